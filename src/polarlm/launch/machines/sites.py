"""Machines as data: how one is recognised and what it wants, from sites.yaml and the user's own file."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from polarlm.config import UserError
from polarlm.config.sources import Leaves, from_yaml
from polarlm.launch.machines.hosts import short_name

__all__ = ["LAUNCHERS", "SCHEDULERS", "Site", "known_sites", "recognise", "site_named", "user_sites_path"]

LAUNCHERS = ("pals", "mpich", "openmpi", "srun")
SCHEDULERS = ("pbs", "slurm", "cobalt")


@dataclass(frozen=True)
class Site:
    """One machine; sites.yaml says what each field means."""

    name: str
    title: str = ""
    hosts: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    scheduler: str | None = None
    launcher: str | None = None
    binding: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    device: str = ""
    devices_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    filesystems: str = ""
    directives: tuple[str, ...] = ()
    queues: Mapping[str, str] = field(default_factory=dict)
    source: str = ""


_FIELDS = [each.name for each in fields(Site) if each.name != "name"]
_LISTS = ("hosts", "binding", "options", "modules", "directives")
_MAPPINGS = ("variables", "environment", "queues")
_CHOICES = {"scheduler": SCHEDULERS, "launcher": LAUNCHERS}


def user_sites_path() -> Path:
    """`~/.config/polarlm/sites.yaml`, where a user's own machines are looked for."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "polarlm" / "sites.yaml"


def known_sites() -> dict[str, Site]:
    """Every machine by its name, the user's own first.

    Raises:
        UserError: a line of the user's file that is none of a site's; by file and line.
    """
    own_path = user_sites_path()
    own = from_yaml(own_path) if own_path.is_file() else {}
    ours = from_yaml(Path(__file__).with_name("sites.yaml"))
    by_name: dict[str, dict[str, Any]] = {}
    # The user's are walked first, so that they stand first, and last, so that their values count.
    for leaves in (own, ours, own):
        for key, value in _checked(leaves):
            name, where, *inner = key
            site = by_name.setdefault(name, {})
            if inner:
                site.setdefault(where, {})[inner[0]] = value
            else:
                site[where] = value
    return {name: Site(name, **values) for name, values in by_name.items()}


def site_named(name: str) -> Site:
    """The machine of that name.

    Raises:
        UserError: there is none; says which there are.
    """
    sites = known_sites()
    if name not in sites:
        near = difflib.get_close_matches(name, sites, n=1)
        mend = (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(sites)}; yours go into {user_sites_path()}"
        )
        raise UserError(f"no site {name!r}; {mend}")
    return sites[name]


def recognise(host: str, environment: Mapping[str, str]) -> Site | None:
    """The machine that `host` and the environment belong to, or None."""
    return next((site for site in known_sites().values() if _matches(site, host, environment)), None)


def _matches(site: Site, host: str, environment: Mapping[str, str]) -> bool:
    if not any(fnmatchcase(short_name(host), pattern) for pattern in site.hosts):
        return False
    variables = site.variables.items()
    return not variables or any(fnmatchcase(environment.get(name, ""), pattern) for name, pattern in variables)


def _checked(leaves: Leaves):
    for key, leaf in leaves.items():
        parts = key.split(".", 2)
        name, where = parts[0], parts[1] if len(parts) > 1 else ""
        if not where:
            raise UserError(f"{leaf.origin}: {name} is a mapping of a site's fields, such as `{name}: {{hosts: [n*]}}`")
        if where not in _FIELDS:
            near = difflib.get_close_matches(where, _FIELDS, n=1)
            raise UserError(
                f"{leaf.origin}: {name}.{where}: unknown field; "
                + (f"did you mean {near[0]}?" if near else f"there are {', '.join(_FIELDS)}")
            )
        yield parts, _value(leaf.value, where, len(parts) == 3, f"{leaf.origin}: {key}")


def _value(value: Any, where: str, is_inner: bool, named: str) -> Any:
    """The value as its field has it, or a complaint."""
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    if where in _MAPPINGS:
        if is_inner and is_scalar:
            return str(value)
        raise UserError(f"{named}: {value!r}: {where} is a mapping of names to text, such as `{{NAME: value}}`")
    if is_inner:
        raise UserError(f"{named}: {where} has no fields of its own")
    if where in _LISTS:
        words = [value] if is_scalar else value
        if not (isinstance(words, list) and all(isinstance(word, str | int) for word in words)):
            raise UserError(f"{named}: {value!r}: should be a list of words")
        return tuple(map(str, words))
    if where == "devices_per_node":
        if not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            raise UserError(f"{named}: {value!r}: should be a whole number above 0")
        return value
    if not is_scalar or (where in _CHOICES and value not in _CHOICES[where]):
        allowed = f"one of {', '.join(_CHOICES[where])}" if where in _CHOICES else "text"
        raise UserError(f"{named}: {value!r}: should be {allowed}")
    return str(value)
