"""Environments on top of a base whose torch stays the one; and activating, which says what is missing.

The base is an environment with a made-up torch; what is installed are wheels written here. No index is asked.
"""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest

from polarlm.config import UserError
from polarlm.launch import Site
from polarlm.launch.machines.modules import Modules
from polarlm.launch.nodes.environments import activation, create_environment, describe_plan, plan_environment

SITE = Site("arctic", modules=("use /soft/modulefiles", "load conda"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python without torch."""
    return make_base(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Python with a torch of the site's own making."""
    python = make_base(tmp_path_factory.mktemp("base"))
    packages = packages_of(python.parents[1])
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("__version__ = '2.11.0+site'\n")
    (packages / "torch-2.11.0+site.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0+site\n"
    (packages / "torch-2.11.0+site.dist-info" / "METADATA").write_text(metadata)
    return python


def make_base(folder):
    venv.create(folder, with_pip=False, symlinks=True)
    pip = distribution("pip")  # imported, it would keep torch's compiler from setuptools in this process
    here = Path(pip.locate_file(""))
    for part in ("pip", f"pip-{pip.version}.dist-info"):
        (packages_of(folder) / part).symlink_to(here / part)
    return folder / "bin" / "python"


def packages_of(environment):
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """pip as it is of itself, without an index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def wheel(tmp_path):
    """A wheel with a module `tiny`, and whatever else it is to hold and to require."""

    def make(requires="torch>=2", name="tiny", version="1.0", **modules):
        path = tmp_path / f"{name}-{version}-py3-none-any.whl"
        about = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        with zipfile.ZipFile(path, "w") as archive:
            for module, text in {"tiny": "x = 1\n", **modules}.items():
                archive.writestr(f"{module}.py", text)
            archive.writestr(f"{about}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        return str(path)

    return make


def plan(tmp_path, base, package, environment=None, site=None):
    return plan_environment(tmp_path / "venvs", "arctic", environment or {}, site, base=base, package=package)


def test_the_sites_torch_is_the_environments(base, wheel, tmp_path):
    planned = plan(tmp_path, base, wheel())
    folder = create_environment(planned)
    assert folder.parent == tmp_path / "venvs" / "arctic"
    assert (folder / "constraints.txt").read_text() == "torch==2.11.0+site\n"
    code = "import tiny, torch; print(tiny.__file__, torch.__file__)"
    said = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [
        str(packages_of(folder) / "tiny.py"),
        str(packages_of(base.parents[1]) / "torch" / "__init__.py"),
    ]
    script = f"source {folder}/bin/activate.polarlm"
    shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (shell.returncode, shell.stdout) == (0, f"python: {folder}/bin/python\n")


def test_a_second_one_of_a_day_gets_a_number(base, wheel, tmp_path):
    planned = plan(tmp_path, base, wheel())
    planned.folder.mkdir(parents=True)
    assert create_environment(planned).name == f"{planned.folder.name}-2"
    assert list(planned.folder.iterdir()) == []


def test_what_wants_another_torch_is_refused_and_nothing_left(base, wheel, tmp_path, monkeypatch):
    wheel("", name="torch", version="99", torch="__version__ = '99'\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # pip could have it
    with pytest.raises(UserError, match=r"pip .* failed, and says: .*conflict"):
        create_environment(plan(tmp_path, base, wheel("torch==99")))
    assert list((tmp_path / "venvs" / "arctic").iterdir()) == []


def test_a_torch_that_comes_in_by_another_name_is_seen(base, wheel, tmp_path):
    with pytest.raises(UserError, match=r"would import torch 6.6.6 from .* instead of the base's 2.11.0\+site"):
        create_environment(plan(tmp_path, base, wheel(torch="__version__ = '6.6.6'\n")))
    assert list((tmp_path / "venvs" / "arctic").iterdir()) == []


def test_a_dry_run_is_what_a_shell_would_do(base, wheel, tmp_path):
    planned = plan(tmp_path, base, wheel())
    subprocess.run(["bash", "-e", "-c", describe_plan(planned)], check=True, capture_output=True)
    said = subprocess.run(
        [planned.folder / "bin" / "python", "-c", "import tiny, torch"], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "there is no module command here"),
        ({"MODULESHOME": "/m"}, "no module is loaded"),
        ({"MODULESHOME": "/m", "LOADEDMODULES": "gcc/12"}, "only gcc/12 are loaded"),
    ],
)
def test_l02_nothing_activated_is_said_with_what_is_missing(environment, words, bare, tmp_path):
    with pytest.raises(UserError, match=words) as raised:
        plan(tmp_path, bare, "x", environment, SITE)
    assert "has no torch" in str(raised.value)
    assert "arctic wants `module use /soft/modulefiles; module load conda`" in str(raised.value)


def test_where_no_site_says_otherwise_pip_brings_torch(bare, tmp_path):
    assert plan(tmp_path, bare, "x").constraints == {}


def test_a_python_that_is_none_is_said(tmp_path):
    with pytest.raises(UserError, match=r"--python: .*nothing: cannot be started"):
        plan(tmp_path, tmp_path / "nothing", "x")


# A stand-in for the `module` command: loads what exists, ends well all the same, and puts a Python of its own first.
MODULE = """
module() {{
    [[ $1 == use ]] && return 0
    case "$2" in conda*) LOADEDMODULES="$LOADEDMODULES:$2"; PATH="{other}:$PATH" ;; *) echo "no module $2" >&2 ;; esac
    return 0
}}
"""


@pytest.fixture
def activate(base, tmp_path):
    """Source the activation of an environment whose modules are these; gives (code, output, errors)."""
    venv.create(tmp_path / "env", with_pip=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "python").symlink_to(sys.executable)
    (tmp_path / "other" / "python3").symlink_to(sys.executable)

    def run(modules, has_command=True):
        planned = replace(plan(tmp_path, base, "x"), modules=Modules(modules, ("/soft",), "/nothing/init/bash"))
        (tmp_path / "script").write_text(activation(planned, tmp_path / "env"))
        head = MODULE.format(other=tmp_path / "other") if has_command else "unset -f module"
        script = f"{head}\nsource {tmp_path}/script || exit 7\ncommand -v python"
        environment = {"PATH": os.environ["PATH"], "LOADEDMODULES": ""}
        said = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
        return said.returncode, said.stdout, said.stderr

    return run


def test_l03_the_environments_python_comes_before_a_modules(activate, tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    assert activate(("conda/2025",)) == (0, f"python: {python}\n{python}\n", "")


@pytest.mark.parametrize(
    ("modules", "has_command", "words"),
    [
        (("conda",), False, "there is no module command"),
        (("conda", "nccl"), True, "module nccl cannot be loaded"),
    ],
)
def test_l02_activating_nothing_fails_and_says_what_is_missing(modules, has_command, words, activate):
    code, output, errors = activate(modules, has_command)
    assert (code, output) == (7, "")
    assert f"error: {words} on " in errors


def test_l02_an_environment_that_is_gone_is_said(activate, tmp_path):
    shutil.rmtree(tmp_path / "env")
    code, output, errors = activate(("conda",))
    assert (code, output) == (7, "")
    assert f"error: there is no {tmp_path}/env/bin/python on " in errors


def test_modules_that_are_loaded_are_part_of_it(base, tmp_path):
    found = plan(tmp_path, base, "x", {"LOADEDMODULES": "conda/2025:nccl/2.2"}, SITE)
    assert found.modules == Modules(("conda/2025", "nccl/2.2"), ("/soft/modulefiles",), "/etc/profile")
    assert "module use --append /soft/modulefiles\nmodule load conda/2025\nmodule load nccl/2.2\n" in describe_plan(
        found
    )
