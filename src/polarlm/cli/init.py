"""Write a commented run file: every line a field with what it means, ready for `polarlm train`."""

import argparse
from importlib.resources import files
from pathlib import Path

from polarlm.config import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `FILE` and `--force`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write it, such as run.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")


def run(arguments: argparse.Namespace) -> None:
    """Write the template.

    Raises:
        UserError: the file is there already, or its folder is not.
    """
    path: Path = arguments.file
    template = files("polarlm.cli").joinpath("run.yaml").read_text(encoding="utf-8")
    try:
        with path.open("w" if arguments.force else "x", encoding="utf-8") as file:
            file.write(template.replace("run.yaml", str(path)))
    except FileExistsError:
        raise UserError(f"{path} is there already: choose another name, or overwrite it with --force") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    print(f"wrote {path}; mend it, then `polarlm train {path}`")
