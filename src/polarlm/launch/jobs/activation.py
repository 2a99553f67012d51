"""The lines of a job script that bring back what its user had: modules, the Python environment, variables.

Everything stands in the script itself; whatever is missing where it runs ends it with one line that says so.
"""

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.sites import Site
from polarlm.launch.start.launchers import forwarded_names

__all__ = ["module_lines", "python_lines", "variable_lines"]

# What a job works out for itself, what its scheduler sets, and what the lines for Python and modules set.
_OWN = (
    *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
_SYSTEMS = ("/bin", "/usr/bin", "/usr/local/bin")  # before these a module puts its own programs, such as mpiexec
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")

_LOAD = """load() {
    module load "$1" && [[ ":$LOADEDMODULES:" == *":$1"[:/]* ]] || fail "module $1 cannot be loaded on $HOSTNAME"
}"""


def module_lines(environment: Mapping[str, str], site: Site | None) -> list[str]:
    """Load the modules that are loaded now, else the site's; no lines where there are neither."""
    loaded = [name for name in (environment.get("LOADEDMODULES") or "").split(":") if name]
    sites = [words.split() for words in site.modules] if site else []
    if not loaded and not sites:
        return []
    folders = [folder for verb, *names in sites if verb == "use" for folder in names]
    if loaded:
        why = "The modules that were loaded where this was submitted."
        own = (environment.get("MODULEPATH") or "").split(":")
        folders += [folder for folder in own if folder not in folders and Path(folder).is_dir() and folder]
    else:
        why = f"The modules that the site {site.name if site else ''} wants; none was loaded where this was submitted."
        loaded = [name for verb, *names in sites if verb == "load" for name in names]
    return [
        f"# {why}",
        f"type module > /dev/null 2>&1 || source {shlex.quote(_module_start(environment))}",
        "type module > /dev/null 2>&1 || fail 'there is no module command on '\"$HOSTNAME\"",
        *([f"module use --append {shlex.join(folders)}"] if folders else []),
        _LOAD,
        *(f"load {shlex.quote(name)}" for name in loaded),
    ]


def _module_start(environment: Mapping[str, str]) -> str:
    """The file that defines `module`: that of the modules in use here, else what every login shell reads."""
    home = environment.get("MODULESHOME")
    return f"{home}/init/bash" if home else "/etc/profile"


def python_lines(environment: Mapping[str, str]) -> list[str]:
    """The Python that runs now, put before any that a module brought, and printed."""
    lines = ["# The Python that submitted this, before any that a module brings."]
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"):
        if environment.get(name):
            lines.append(_export(name, environment[name]))
    lines += [
        f"python={shlex.quote(sys.executable)}",
        '[[ -x $python ]] || fail "there is no $python on $HOSTNAME; is its file system there?"',
    ]
    if str(Path(sys.executable).parent) not in _SYSTEMS:
        lines.append('export PATH="${python%/*}:$PATH"')
    return [*lines, 'echo "python: $python on $HOSTNAME"']


def variable_lines(environment: Mapping[str, str], in_config: Iterable[str]) -> list[str]:
    """The variables that training looks at and that are set now; secrets stay out of the file.

    Args:
        in_config: variables that have become fields of the run; set again, they would replace what flags said.
    """
    names = [name for name in forwarded_names(environment) if environment[name] and name not in _OWN]
    secret = [name for name in names if any(word in name.upper() for word in _SECRETS)]
    exports = [_export(name, environment[name]) for name in names if name not in secret and name not in in_config]
    lines = ["# Variables that were set where this was submitted.", *exports] if exports else []
    if secret:
        lines.append(f"# Set there, and not written down: {', '.join(secret)}")
    if in_config:
        lines += ["# In the run's config.yaml already.", f"unset {' '.join(sorted(in_config))}"]
    return lines


def _export(name: str, value: str) -> str:
    """
    Raises:
        UserError: a value that no line of a script can hold.
    """
    if "\0" in value:
        raise UserError(f"{name} in the environment holds a zero byte: unset it")
    return f"export {name}={shlex.quote(value)}"
