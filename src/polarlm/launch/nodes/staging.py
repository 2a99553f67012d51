"""A Python environment as a file, and that file as an environment at another path.

An environment holds its own path in a few texts: the first lines of the programs in `bin/`, its activation scripts,
`pyvenv.cfg`, and `.pth` files. Everything else finds its place from where the interpreter lies. So a copy works at
another path, and without the original, once these texts say the new path.
"""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from polarlm.config import UserError

__all__ = ["MARK", "pack", "replace_path", "room_needed", "unpack"]

MARK = ".polarlm-staged"  # in a copy that we made, and may replace
_LARGEST_TEXT = 1 << 20
_TEXTS = ("bin/*", "pyvenv.cfg", "lib/python*/site-packages/*.pth", "lib/python*/site-packages/__editable__*.py")


def pack(source: Path, tar: Path) -> None:
    """Write the whole of an environment into one file."""
    with tarfile.open(tar, "w") as archive:
        archive.add(source, arcname=".")


def room_needed(tar_bytes: int) -> int:
    """Free bytes that a node must have: for the file, for what is in it, and a little."""
    return 2 * tar_bytes + tar_bytes // 10


def unpack(tar: Path, source: Path, to: Path) -> None:
    """Put the environment of a file at `to`, whole or not at all, and see that it runs there.

    Args:
        source: the path it had.

    Raises:
        UserError: something else is at `to`, or Python does not start there.
        OSError: it cannot be written.
    """
    if to.exists() and not (to / MARK).exists():
        raise UserError(f"{to}: is there already, and no staged environment; remove it, or stage --to another")
    aside = to.with_name(f".{to.name}.{os.getpid()}.partial")
    aside.mkdir(mode=0o700)
    try:
        with tarfile.open(tar) as archive:
            # Python 3.11.3 and older know no filters; the file comes from one who knows the job's key.
            safely = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
            archive.extractall(aside, **safely)
        replace_path(aside, source, to)
        (aside / MARK).touch()
        if to.exists():
            shutil.rmtree(to)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _check_python(to)


def replace_path(environment: Path, old: Path, new: Path) -> None:
    """Let the texts of an environment say `new` where they say `old`."""
    # Not where a longer name only begins alike.
    pattern = re.compile(rb"|".join(re.escape(os.fsencode(path)) + rb"(?![\w.-])" for path in {old, old.resolve()}))
    for path in (found for texts in _TEXTS for found in environment.glob(texts)):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_TEXT:
            continue
        text = path.read_bytes()
        if b"\0" not in text and pattern.search(text):
            path.write_bytes(pattern.sub(lambda _: os.fsencode(new), text))


def _check_python(environment: Path) -> None:
    python = environment / "bin" / "python"
    try:
        said = subprocess.run(
            [python, "-I", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, timeout=60
        )
        prefix, complaint = said.stdout.strip(), said.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        prefix, complaint = "", str(error)
    if not prefix or Path(prefix).resolve() != environment.resolve():
        raise UserError(f"{python}: does not run there ({complaint or f'its prefix is {prefix}'})")
