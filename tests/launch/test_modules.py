"""What a module has set where `polarlm launch` was called is so for every rank, whatever starts it.

The launchers are stand-ins that hand a rank nothing of their own environment but what they are told to, as where they
reach other hosts by ssh.
"""

import json
import os
import subprocess
import sys

import pytest

from polarlm.launch import Site
from polarlm.launch.machines.modules import Modules, loaded_modules, missing_names, site_modules

SAYS = {
    "openmpi": "mpirun (Open MPI) 4.1.6",
    "mpich": "HYDRA build details:\\n    Version:  4.2.1",
    "pals": "mpiexec version 1.3.4",
    "srun": "slurm 23.02.7",
}
# As the options are in each one's manual.
STAND_IN = """#!{python} -S
import os, re, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("{says}"))
start = sys.argv.index({python!r})
options = sys.argv[1:start]
given = {{"HOME": "/root", "PATH": "/usr/bin:/bin", "HOSTNAME": "there"}}
if "--envall" in options or "-genvall" in options or "--export=ALL" in options:
    given = dict(os.environ)
names = [options[n + 1] for n, word in enumerate(options) if word == "-x"]
given.update((name, os.environ[name]) for name in names)
def task(rank):
    place = {{"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}}
    return subprocess.Popen(sys.argv[start:], env={{**given, **place}})
sys.exit(max([process.wait() for process in [task(0), task(1)]]))
"""
# Sets, as real ones do, more than paths, and more than any list of prefixes could have foreseen.
LOAD = """
module() {
    export LOADEDMODULES=$2/1.0 _LMFILES_=/soft/$2/1.0.lua
    export PATH=/soft/$2/bin:$PATH LD_LIBRARY_PATH=/soft/$2/lib MKLROOT=/soft/$2/mkl EBROOTTOOLS='two words, a comma;'
    export FLAGS=$'two\\nlines' LD_PRELOAD=
}
env -0 > before
module load tools
env -0 > after
exec "$@"
"""
PROGRAM = "import json, os; json.dump(dict(os.environ), open(f\"rank{os.environ['RANK']}\", 'w'))"


def read_environment(path):
    return dict(entry.split("=", 1) for entry in path.read_text().split("\0") if entry)


@pytest.mark.parametrize("launcher", SAYS)
def test_every_rank_has_what_a_module_set(launcher, tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / ("srun" if launcher == "srun" else "mpiexec")
    program.write_text(STAND_IN.format(python=sys.executable, says=SAYS[launcher]))
    program.chmod(0o755)
    place = {"MASTER_ADDR": "127.0.0.1", "HOSTNAME": "here", "VIRTUAL_ENV": "/home/me/venv"}
    words = [sys.executable, "-m", "polarlm", "launch", "--launcher", launcher, "--hosts", "a:1,b:1", "--"]
    done = subprocess.run(
        ["bash", "-c", LOAD, "bash", *words, sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | place | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    before, after = (read_environment(tmp_path / name) for name in ("before", "after"))
    loaded = {name: value for name, value in after.items() if before.get(name) != value and name != "_"}
    assert {"PATH", "LD_LIBRARY_PATH", "MKLROOT", "EBROOTTOOLS", "FLAGS", "LD_PRELOAD", "_LMFILES_"} < {*loaded}
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert {name: found.get(name) for name in loaded} == loaded
        assert found["VIRTUAL_ENV"] == "/home/me/venv"
        assert found["HOSTNAME"] == ("there" if launcher == "openmpi" else "here")


def test_which_modules_are_meant(tmp_path):
    site = Site("arctic", modules=("use /soft/a /soft/b", "load gcc conda/2025"))
    here = {"LOADEDMODULES": "gcc/13:conda", "MODULEPATH": f"/not/there:{tmp_path}:/soft/a", "MODULESHOME": "/m"}
    assert loaded_modules(here, site) == Modules(
        ("gcc/13", "conda"), ("/soft/a", "/soft/b", str(tmp_path)), "/m/init/bash"
    )
    assert missing_names(here, site) == ["conda/2025"]
    assert missing_names({"LOADEDMODULES": "gcc-libs:conda/2025"}, site) == ["gcc"]
    assert site_modules({}, site) == Modules(("gcc", "conda/2025"), ("/soft/a", "/soft/b"), "/etc/profile")
    assert loaded_modules({"LOADEDMODULES": ""}, site) == site_modules(here, None) == Modules()
    assert missing_names({}, None) == []
