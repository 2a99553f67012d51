"""A run's folder, `runs/<name>/`, and the signs that point to the newest."""

import os
import re
from pathlib import Path

from polarlm.launch.machines.hosts import short_host_name

__all__ = ["announce", "create", "find", "log_name", "log_path", "next_folder"]


def create(root: Path, name: str) -> Path:
    """Make `root/name`, or when that is taken `name-2`, `name-3`, ..., each with its `logs/`.

    `mkdir` itself decides who gets a name, so two runs that start at the same moment get two folders.
    """
    root.mkdir(parents=True, exist_ok=True)
    number = _next_number(root, name)
    while True:
        folder = root / _numbered(name, number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        (folder / "logs").mkdir()
        return folder


def next_folder(root: Path, name: str) -> Path:
    """What `create` would make now."""
    return root / _numbered(name, _next_number(root, name))


def find(root: Path, name: str) -> Path | None:
    """Return the newest of `root/name`, `root/name-2`, ..., or None when there is none."""
    family = _family(root, name)
    return family[max(family)] if family else None


def announce(folder: Path) -> None:
    """Let `latest` beside `folder` point to it, and `logfiles` in the current folder end with its first rank's log."""
    with open("logfiles", "a", encoding="utf-8") as index:
        index.write(f"{log_path(folder, short_host_name(), 0)}\n")
    aside = folder.parent / f".latest-{os.getpid()}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(folder.name)
    try:
        os.replace(aside, folder.parent / "latest")
    finally:
        aside.unlink(missing_ok=True)


def log_path(folder: Path, host: str, rank: int) -> Path:
    """Where one rank's output goes: `folder/logs/<host>.<rank>.log`."""
    return folder / "logs" / log_name(host, rank)


def log_name(host: str, rank: int) -> str:
    """Return the name of one rank's log among those of its run."""
    return f"{host}.{rank}.log"


def _next_number(root: Path, name: str) -> int:
    return max(_family(root, name), default=0) + 1


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _family(root: Path, name: str) -> dict[int, Path]:
    """Folders of one name by their number; `create` always takes a higher one, so the highest is the newest."""
    pattern = re.compile(re.escape(name) + r"(?:-([2-9]|[1-9]\d+))?")
    family = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            family[int(match[1] or 1)] = path
    return family
