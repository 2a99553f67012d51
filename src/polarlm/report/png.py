"""A figure as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polarlm.config import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save_png"]


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whatever the file's name ends in; its folder is made.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); mend that, or choose another place") from None
