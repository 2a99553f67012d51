"""What a launch in a test's folder has written, and what of it still lives."""

import os
from pathlib import Path


def living(folder: Path) -> dict[int, str]:
    """Command lines of living processes that name this test's folder, by their ids, seen by the kernel's own list."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and any(str(folder).encode() in word for word in words):
            found[int(entry.name)] = b" ".join(words).decode()
    return found


def logs(folder: Path, rank: int) -> str:
    """What that rank has written to its log; nothing where there is none yet."""
    paths = list((folder / "logs").glob(f"*.{rank}.log"))
    return paths[0].read_text(errors="replace") if paths else ""
