"""Folders for what is written: those that were made for it go again when it comes to nothing."""

import contextlib
from collections.abc import Sequence
from pathlib import Path


def make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents, and return those that were not there, innermost first.

    Raises:
        OSError: it cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove those folders that hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
