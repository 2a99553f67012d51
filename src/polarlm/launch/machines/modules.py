"""Environment modules, Lmod's or Tcl's: which are loaded here, and the lines of bash that load them elsewhere."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polarlm.launch.machines.sites import Site

__all__ = ["Modules", "load_lines", "loaded_modules", "loaded_names", "missing_names", "site_modules"]


@dataclass(frozen=True)
class Modules:
    """What is to be loaded.

    Attributes:
        names: in this order.
        folders: where they are looked for besides where the other machine does; the site's first.
        start: the file that defines `module` where a shell has none.
    """

    names: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    start: str = ""


def loaded_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What is loaded now, `NAME/VERSION` as a rule."""
    return tuple(name for name in (environment.get("LOADEDMODULES") or "").split(":") if name)


def loaded_modules(environment: Mapping[str, str], site: Site | None) -> Modules:
    """Those that are loaded now, and where they may be; none of it where none is."""
    names = loaded_names(environment)
    own = [folder for folder in (environment.get("MODULEPATH") or "").split(":") if folder and Path(folder).is_dir()]
    folders = (*_words(site, "use"), *own)
    return Modules(names, tuple(dict.fromkeys(folders)), _start(environment)) if names else Modules()


def site_modules(environment: Mapping[str, str], site: Site | None) -> Modules:
    """Those that the site wants."""
    names = _words(site, "load")
    return Modules(names, _words(site, "use"), _start(environment)) if names else Modules()


def missing_names(environment: Mapping[str, str], site: Site | None) -> list[str]:
    """Which of the site's modules are not loaded now, in whatever version."""
    loaded = loaded_names(environment)
    return [name for name in _words(site, "load") if not any(f"{each}/".startswith(f"{name}/") for each in loaded)]


def load_lines(modules: Modules, leave: str = "") -> list[str]:
    """Lines of bash that load them, and call `fail MESSAGE` where one is not loaded then.

    Args:
        leave: what follows a `fail` that returns, such as ` || return 1` in a file to be sourced.
    """
    if not modules.names:
        return []
    return [
        f"type module > /dev/null 2>&1 || source {shlex.quote(modules.start)}",
        f"type module > /dev/null 2>&1 || fail 'there is no module command'{leave}",
        *([f"module use --append {shlex.join(modules.folders)}"] if modules.folders else []),
        f"for module_name in {shlex.join(modules.names)}; do",
        "    # Many a `module load` that fails says so and ends well.",
        '    module load "$module_name" && [[ ":$LOADEDMODULES:" == *":$module_name"[:/]* ]] ||',
        f'        fail "module $module_name cannot be loaded"{leave}',
        "done",
    ]


def _start(environment: Mapping[str, str]) -> str:
    """That of the modules in use here, else what every login shell reads."""
    home = environment.get("MODULESHOME")
    return f"{home}/init/bash" if home else "/etc/profile"


def _words(site: Site | None, wanted: str) -> tuple[str, ...]:
    """What stands behind this verb, `use` or `load`, in the site's modules."""
    lines = [words.split() for words in site.modules] if site else []
    return tuple(word for verb, *words in lines if verb == wanted for word in words)
