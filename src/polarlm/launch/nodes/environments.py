"""A Python environment for PolarLM on top of a site's own, whose torch it uses and never replaces.

The site's torch is built for its accelerators and network; pip's would be another. So the new environment sees the
site's packages, and pip is held to the versions that are there; afterwards the environment itself is asked whose torch
it imports.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import polarlm
from polarlm.config import UserError
from polarlm.launch.machines.modules import Modules, load_lines, loaded_modules
from polarlm.launch.machines.sites import Site

__all__ = ["Plan", "create_environment", "describe_plan", "plan_environment"]

# What belongs to a site's torch, or is built against it.
_KEPT = (
    *("torch", "torchvision", "torchaudio", "triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"),
    *("intel-extension-for-pytorch", "oneccl-bind-pt", "numpy"),
)
_ASK_BASE = """
import importlib.metadata as metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try: versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError: pass
folders = [path for path in sys.path if path.endswith("-packages")] if sys.prefix != sys.base_prefix else []
print(json.dumps({"python": list(sys.version_info[:3]), "versions": versions, "folders": folders}))
"""
_ASK_TORCH = "import json, torch; print(json.dumps([torch.__version__, torch.__file__]))"


@dataclass(frozen=True)
class Plan:
    """What will be made.

    Attributes:
        folder: of the environment; made by `create_environment`, with a number behind where it is there by then.
        base: the Python it stands on.
        package: what pip installs.
        constraints: packages of the base, and the versions that pip must leave.
        shared: folders of packages that the base sees and its own environments do not: those of an environment.
        modules: that must be loaded before it.
    """

    folder: Path
    base: Path
    package: str
    constraints: Mapping[str, str]
    shared: tuple[str, ...]
    modules: Modules

    def commands(self, folder: Path) -> list[list[str]]:
        """What is run to make it."""
        install = ["install", "--disable-pip-version-check", "-c", str(folder / "constraints.txt"), self.package]
        return [
            [str(self.base), "-m", "venv", "--system-site-packages", "--without-pip", str(folder)],
            [str(self.base), "-m", "pip", "--python", str(folder / "bin" / "python"), *install],
        ]


def plan_environment(
    root: Path,
    machine: str,
    environment: Mapping[str, str],
    site: Site | None,
    base: Path | None = None,
    package: str | None = None,
) -> Plan:
    """Find out what to build on.

    Args:
        root, machine: the environment goes to `root/machine/date`.
        base: a Python; by default the one that runs this.
        package: what to install; by default this PolarLM.

    Raises:
        UserError: nothing is activated that has a torch where the site says what to activate; or there is no such
            Python.
    """
    base = base or Path(sys.executable)
    about = _ask(base, _ASK_BASE, *_KEPT)
    if tuple(about["python"]) < (3, 11):
        raise UserError(
            f"--python: {base} is Python {'.'.join(map(str, about['python']))}; PolarLM needs 3.11 or newer"
        )
    modules = loaded_modules(environment, site)
    if "torch" not in about["versions"] and site and site.modules:
        raise UserError(_what_is_missing(base, site, environment, modules.names))
    return Plan(
        folder=(root / machine / date.today().isoformat()).absolute(),
        base=base,
        package=package or _this_package(),
        constraints=about["versions"],
        shared=tuple(about["folders"]),
        modules=modules,
    )


def create_environment(plan: Plan) -> Path:
    """Make it, whole or not at all; returns its folder.

    Raises:
        UserError: a command fails, with its last words; or the environment would import another torch.
    """
    folder = _make_folder(plan.folder)
    try:
        make, install = plan.commands(folder)
        _run(make)
        (folder / "constraints.txt").write_text(_constraints(plan))
        if plan.shared:
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "shared.pth").write_text(_shared_line(plan) + "\n")
        _run(install)
        _check_torch(plan, folder)
        (folder / "bin" / "activate.polarlm").write_text(activation(plan, folder))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


def describe_plan(plan: Plan) -> str:
    """The plan as lines that a shell takes."""
    make, install = (shlex.join(words) for words in plan.commands(plan.folder))
    lines = [f"module use --append {shlex.join(plan.modules.folders)}"] if plan.modules.folders else []
    lines += [f"module load {shlex.quote(name)}" for name in plan.modules.names]
    lines += [make, f"cat > {plan.folder}/constraints.txt << END", *_constraints(plan).splitlines(), "END"]
    if plan.shared:
        packages = f"{plan.folder}/lib/python*/site-packages"
        lines += ["# The base is an environment, whose packages its own environments do not see by themselves."]
        lines += [f"echo {shlex.quote(_shared_line(plan))} > $(echo {packages})/shared.pth"]
    return "\n".join([*lines, install])


def activation(plan: Plan, folder: Path) -> str:
    """A script to be sourced: modules, then the environment, which must then be what `python` is; or it says what is
    missing and fails."""
    python, leave = folder / "bin" / "python", " || return 1"
    return "\n".join(
        [
            f"# source {folder}/bin/activate.polarlm",
            'fail() { echo "error: $1 on $HOSTNAME" >&2; return 1; }',
            *load_lines(plan.modules, leave),
            f"[[ -x {shlex.quote(str(python))} ]] || fail {shlex.quote(f'there is no {python}')}{leave}",
            "# Last, since a module may put another Python first.",
            f"source {shlex.quote(str(folder / 'bin' / 'activate'))}",
            f"[[ $(command -v python) == {shlex.quote(str(python))} ]] || "
            f'fail "python is $(command -v python), not the environment\'s,"{leave}',
            'echo "python: $(command -v python)"',
            "",
        ]
    )


def _what_is_missing(base: Path, site: Site, environment: Mapping[str, str], loaded: tuple[str, ...]) -> str:
    wanted = "; ".join(f"module {words}" for words in site.modules)
    if not environment.get("MODULESHOME") and not environment.get("LMOD_CMD"):
        missing = "there is no module command here"
    elif not loaded:
        missing = "no module is loaded"
    else:
        missing = f"of the modules only {', '.join(loaded)} are loaded"
    return f"{base} has no torch, and {missing}: {site.name} wants `{wanted}`; or name another with --python"


def _this_package() -> str:
    """The checkout that this PolarLM runs from, else its version."""
    checkout = Path(polarlm.__file__).parents[2]
    return str(checkout) if (checkout / "pyproject.toml").exists() else f"polarlm=={polarlm.__version__}"


def _constraints(plan: Plan) -> str:
    return "".join(f"{name}=={version}\n" for name, version in plan.constraints.items())


def _shared_line(plan: Plan) -> str:
    return f"import site; {'; '.join(f'site.addsitedir({json.dumps(path)})' for path in plan.shared)}"


def _make_folder(wanted: Path) -> Path:
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(
                f"{error.filename or folder}: cannot be written ({error.strerror}); choose --folder"
            ) from None
        else:
            return folder


def _run(words: list[str]) -> None:
    """
    Raises:
        UserError: it fails.
    """
    said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if said.returncode:
        lines = [line for line in said.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines or ["nothing"]
        raise UserError(f"`{shlex.join(words[:4])} ...` failed, and says: {errors[0].removeprefix('ERROR: ')}")


def _check_torch(plan: Plan, folder: Path) -> None:
    """
    Raises:
        UserError: the environment imports another torch than its base.
    """
    if "torch" not in plan.constraints:
        return
    theirs, ours = _ask(plan.base, _ASK_TORCH), _ask(folder / "bin" / "python", _ASK_TORCH)
    if theirs != ours:
        raise UserError(
            f"{folder}: would import torch {ours[0]} from {ours[1]} instead of the base's {theirs[0]} from {theirs[1]}"
        )


def _ask(python: Path, code: str, *words: str):
    try:
        said = subprocess.run([python, "-c", code, *words], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise UserError(f"--python: {python}: cannot be started ({error.strerror})") from None
    if said.returncode:
        raise UserError(f"--python: {python} fails: {(said.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    return json.loads(said.stdout.splitlines()[-1])
