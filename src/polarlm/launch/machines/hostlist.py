"""Lists of hosts as schedulers and users write them: Slurm's compressed names, node files, host files."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polarlm.config import UserError
from polarlm.launch.machines.hosts import short_name

__all__ = ["Host", "expand_nodelist", "expand_tasks", "merge_hosts", "parse_hosts", "read_host_file"]

_MOST_HOSTS = 100_000
_LITERAL = re.compile(r"[A-Za-z0-9_.-]+")
# Numbers of a length that Python reads, in ASCII: what schedulers write is far below.
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_ENTRY = re.compile(
    r"(?P<name>(?:[\w.+-]+@)?(?:[\w.-]+|[0-9A-Fa-f:]*::[0-9A-Fa-f:]*))"
    r"(?::(?P<count>[0-9]{1,9})|\s+slots=(?P<slots>[0-9]{1,9}))?"
)


@dataclass(frozen=True)
class Host:
    """One machine, and how many processes its list has room for on it; the name may say a user, as in `me@10.0.0.1`."""

    name: str
    slots: int = 1

    @property
    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


def expand_nodelist(text: str, origin: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Names of a Slurm node list, in its order: `h[001,003-004]` is h001, h003, h004, and `r[0-1]_b[0-1]` four hosts.

    Raises:
        UserError: a form that is not Slurm's; names `origin` and what is wrong.
    """
    names: list[str] = []
    for item in _split(text, origin):
        names += _expand(item, text, origin)
        if len(names) > _MOST_HOSTS:
            raise UserError(f"{origin}={text!r} names more than {_MOST_HOSTS} hosts")
    return names


def _split(text: str, origin: str) -> Iterator[str]:
    """Part a list at the commas outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _malformed(text, origin, "brackets do not pair")
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise _malformed(text, origin, "brackets do not pair")
    yield text[start:]


def _expand(item: str, text: str, origin: str) -> list[str]:
    names = [""]
    for part in re.split(r"(\[[^\]]*\])", item):
        if not part:
            continue
        if part.startswith("["):
            endings = [number for piece in part[1:-1].split(",") for number in _numbers(piece, text, origin)]
        elif _LITERAL.fullmatch(part):
            endings = [part]
        else:
            raise _malformed(text, origin, f"{part!r} is no part of a host name")
        if len(names) * len(endings) > _MOST_HOSTS:
            raise UserError(f"{origin}={text!r} names more than {_MOST_HOSTS} hosts")
        names = [name + ending for name in names for ending in endings]
    if names == [""]:
        raise _malformed(text, origin, "a name is empty")
    return names


def _numbers(piece: str, text: str, origin: str) -> list[str]:
    """`003-004` is 003, 004: as wide as the first number is written."""
    match = _RANGE.fullmatch(piece)
    if not match:
        raise _malformed(text, origin, f"{piece!r} is no number and no range")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first):
        raise _malformed(text, origin, f"the range {piece} goes down")
    if int(last) - int(first) >= _MOST_HOSTS:
        raise UserError(f"{origin}={text!r} names more than {_MOST_HOSTS} hosts")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _malformed(text: str, origin: str, what: str) -> UserError:
    return UserError(f"{origin}={text!r} is not a list of hosts ({what}): mend it, or say them with --hosts a,b")


def expand_tasks(text: str, origin: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Slurm's counts by node: `4(x2),3` is 4, 4, 3.

    Raises:
        UserError: another form.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = _TASKS.fullmatch(piece.strip())
        if not match or int(match[2] or 1) > _MOST_HOSTS:
            raise UserError(f"{origin}={text!r} is not a list of counts such as 4(x2),3: unset it, or mend it")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def merge_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """One entry a machine, in the order of their first; a machine listed again adds its slots."""
    merged: dict[str, Host] = {}
    for host in hosts:
        key = short_name(host.address)
        before = merged.get(key)
        merged[key] = Host(before.name, before.slots + host.slots) if before else host
    return tuple(merged.values())


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `--hosts a,b` or `a:4,b:4`.

    Raises:
        UserError: an entry that is none.
    """
    entries = [entry.strip() for entry in text.split(",")]
    hosts = [_parse_entry(entry) for entry in entries]
    if None in hosts:
        raise UserError(f"--hosts: {entries[hosts.index(None)]!r} is no host; give them as a,b or a:4,b:4")
    return merge_hosts(host for host in hosts if host)


def read_host_file(text: str, path: str) -> tuple[Host, ...]:
    """The hosts of a host file: `name`, `name slots=4`, `name:4` or `user@name slots=4` a line, `#` for comments.

    Raises:
        UserError: a line that is none of these, by its number and text; or there is no host.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        host = _parse_entry(entry)
        if host is None:
            raise UserError(f"{path}:{number}: {line.strip()!r} is not a host; a line is `name` or `name slots=4`")
        hosts.append(host)
    if not hosts:
        raise UserError(f"{path}: names no host; a line is `name` or `name slots=4`")
    return merge_hosts(hosts)


def _parse_entry(entry: str) -> Host | None:
    match = _ENTRY.fullmatch(entry)
    if not match:
        return None
    count = int(match["count"] or match["slots"] or 1)
    return Host(match["name"], count) if count else None
