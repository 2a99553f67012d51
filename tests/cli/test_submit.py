"""`polarlm submit`: what is asked of a scheduler, checked before; the scripts run, with stand-ins for all programs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from job_scenes import DOCUMENT, JOB_SCENES, RUN, TEXTS, with_script, write_script
from polarlm.cli import main
from polarlm.launch.jobs.record import read_jobs

# Each writes down what it got; job ids count up from 100.
STAND_IN = """#!/bin/sh
n=$(( $(cat {folder}/count 2> /dev/null || echo 99) + 1 )); echo $n > {folder}/count
echo "{name} $*" >> {folder}/asked
for last; do :; done
cp "$last" {folder}/$n.sh
printf '{answer}\\n' $n
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a run file, and programs that stand in for both schedulers'."""
    work = tmp_path / "work, with 'odd' name"
    (tmp_path / "bin").mkdir()
    work.mkdir()
    (work / "run.yaml").write_text(RUN)
    for name, answer in (("qsub", "%d.polaris-pbs-01"), ("sbatch", "%d;cluster")):
        stand_in(tmp_path, name, STAND_IN.format(folder=tmp_path, name=name, answer=answer))
    for name in ("LOADEDMODULES", "MODULESHOME", "MODULEPATH", "VIRTUAL_ENV", "SEQ_LEN", "SP_TYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(work)
    return tmp_path


def stand_in(folder, name, text):
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def submit(words):
    return main(["submit", *words.split()])


def asked(folder):
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("name", JOB_SCENES)
def test_the_scripts_of_each_machine_are_as_they_are_kept(name, tmp_path):
    """`python tests/job_scenes.py` writes them anew."""
    text = write_script(JOB_SCENES[name], tmp_path)
    assert text == (TEXTS / f"{name}.sh").read_text()
    assert os.listdir(tmp_path) == ["run.yaml"], "a dry run writes nothing"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", JOB_SCENES)
def test_l05_l23_a_script_fetches_nothing_and_hands_no_value_to_an_option(name):
    text = (TEXTS / f"{name}.sh").read_text()
    for word in ("curl", "wget", "git ", "pip ", "http", "-v ", "--export", "secret"):
        assert word not in text
    assert [line for line in text.splitlines() if "source" in line] == [
        line for line in text.splitlines() if line.startswith("type module")
    ][:1], "nothing is sourced but what defines `module`"


def test_the_document_shows_a_script_as_it_is_written():
    document = DOCUMENT.read_text()
    assert "<!-- job script: polaris -->" in document
    assert with_script(document, "polaris", (TEXTS / "polaris.sh").read_text()) == document


def test_a_job_is_submitted_to_pbs_and_written_down(here, capsys):
    assert submit("run.yaml --site polaris --nodes 2 --walltime 01:00:00 --queue debug --account me") == 0
    assert asked(here) == ["qsub runs/demo/job.sh"]
    assert capsys.readouterr().out == "runs/demo: job 100.polaris-pbs-01, 2 nodes, 8 ranks, 01:00:00\n"
    assert (here / "100.sh").read_text() == Path("runs/demo/job.sh").read_text()
    assert "ranks: 8" in Path("runs/demo/config.yaml").read_text(), "the run is laid over the job's nodes"
    (job,) = read_jobs(Path("runs/demo"))
    assert (job.id, job.scheduler, job.nodes, job.walltime_s, job.queue) == (
        "100.polaris-pbs-01", "pbs", 2, 3600, "debug",
    )  # fmt: skip
    assert not Path("logfiles").exists(), "no rank has written anything yet"


def test_a_chain_is_jobs_each_after_the_one_before(here, capsys):
    assert submit("run.yaml --site perlmutter --nodes 2 --walltime 01:00:00 --chain 3") == 0
    assert asked(here) == [
        "sbatch --parsable runs/demo/job.sh",
        "sbatch --dependency=afterany:100 --parsable runs/demo/job.sh",
        "sbatch --dependency=afterany:101 --parsable runs/demo/job.sh",
    ]
    assert capsys.readouterr().out.splitlines()[2] == "runs/demo: job 102, 2 nodes, 8 ranks, 01:00:00, after 101"
    assert submit("run.yaml --site polaris --walltime 01:00:00 --chain 2") == 0
    assert asked(here)[3:] == [
        "qsub runs/demo-2/job.sh",
        "qsub -W depend=afterany:103.polaris-pbs-01 runs/demo-2/job.sh",
    ]


def test_a_run_is_resumed_on_other_nodes_by_name_or_folder(here):
    assert submit("run.yaml --site polaris --nodes 2 --walltime 01:00:00") == 0
    os.symlink("demo", "runs/latest")
    assert submit("run.yaml --resume --site polaris --nodes 1 --walltime 00:10:00 --train.steps 200") == 0
    assert submit("runs/latest --resume --site polaris --nodes 3 --walltime 00:10:00") == 0
    assert asked(here) == ["qsub runs/demo/job.sh"] * 3
    config = Path("runs/demo/config.yaml").read_text()
    assert "ranks: 12" in config
    assert "steps: 200" in config
    assert submit("run.yaml --resume --site polaris --walltime 00:10:00 --model.layers 2") == 2, "not the same run"
    assert len(asked(here)) == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run.yaml --site polaris --walltime 90", "--walltime: '90'"),
        ("run.yaml --site polaris --walltime 01:75:00", "--walltime: '01:75:00'"),
        ("run.yaml --site polaris --walltime 00:00:00", "--walltime: '00:00:00'"),
        ("run.yaml --site polaris --walltime ٠١:00:00", "--walltime: '٠١:00:00'"),
        ("run.yaml --site polaris --walltime 01:00:00 --nodes 0", "--nodes: 0"),
        ("run.yaml --site polaris --walltime 01:00:00 --devices-per-node 0", "--devices-per-node: 0"),
        ("run.yaml --site= --walltime 01:00:00", "no site ''"),
        ("run.yaml --site polaris --walltime 01:00:00 --nodes 5", "train.global_batch_size: 24 is not a multiple"),
        ("run.yaml --site polaris --walltime 01:00:00 --parallel.context 8", "parallel.ranks: 4 is not a multiple"),
        ("run.yaml --site polaris --walltime 01:00:00 --nodes 2 --parallel.ranks 3", "parallel.ranks: 3 cannot"),
        ("run.yaml --site polaris --walltime 01:00:00 --parallel.ranks 6", "parallel.ranks: 6 cannot"),
        ("run.yaml --site polaris --walltime 01:00:00 --train.stps 3", "--train.stps"),
        ("run.yaml --site polaris --walltime 01:00:00 --data.paths none", "data.paths"),
        ("run.yaml --site polaris --walltime 01:00:00 --queue a;b", "--queue: 'a;b'"),
        ("run.yaml --site polaris --walltime 01:00:00 --option x", "--option: 'x'"),
        ("run.yaml --site polaris --walltime 01:00:00 --chain 0", "--chain: 0"),
        ("run.yaml --site polari --walltime 01:00:00", "no site 'polari'"),
        ("run.yaml --site thetagpu --walltime 01:00:00", "cobalt"),
        ("run.yaml --walltime 01:00:00", "--scheduler: both qsub and sbatch are"),
        ("run.yaml --scheduler slurm --walltime 01:00:00", "--devices-per-node: nothing says"),
        ("none.yaml --site polaris --walltime 01:00:00", "none.yaml: no such file"),
        ("run.yaml --site polaris", "--walltime"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_submitted_or_left(words, named, here, capsys):
    assert submit(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said
    assert said.count("\n") == 1
    assert asked(here) == []
    assert not Path("runs").exists()


def test_a_refused_job_leaves_nothing(here, capsys):
    stand_in(here, "qsub", "#!/bin/sh\necho 'qsub: Unknown queue' >&2\nexit 170\n")
    assert submit("run.yaml --site polaris --walltime 01:00:00 --queue none") == 2
    assert capsys.readouterr().err == "error: qsub refused the job: qsub: Unknown queue\n"
    assert os.listdir("runs") == []


def test_a_missing_command_is_one_line(here, capsys, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "polaris-login-01")
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit("run.yaml --walltime 01:00:00") == 2
    assert capsys.readouterr().err == (
        "error: qsub is not on the PATH of polaris-login-01: submit where PBS is, or see the script with --dry-run\n"
    )
    assert not Path("runs").exists()


def test_a_stop_file_must_go_first(here, capsys):
    assert submit("run.yaml --site polaris --walltime 01:00:00") == 0
    Path("runs/demo/stop").touch()
    assert submit("run.yaml --resume --site polaris --walltime 01:00:00") == 2
    assert "runs/demo/stop would end the run at once" in capsys.readouterr().err
    assert len(asked(here)) == 1


def run_script(script="runs/demo/job.sh", **environment):
    """Run a script as a scheduler does: elsewhere, with hardly any environment."""
    clean = {"PATH": os.environ["PATH"], "HOME": "/", "PBS_JOBID": "100.polaris-pbs-01"} | environment
    return subprocess.run(
        ["bash", os.path.abspath(script)], cwd="/", env=clean, capture_output=True, text=True, timeout=300
    )


# What `module` is on such a machine: one that evicts the user's own Python.
MODULES = """module() {{
    echo "module $*" >> {folder}/modules
    [[ $1 == load && $2 != absent* ]] && LOADEDMODULES+=":$2/1.0" && PATH={folder}/evil:$PATH
    [[ $1 == use || $2 != missing* ]]
}}
"""


@pytest.fixture
def modules(here, monkeypatch):
    (here / "lmod" / "init").mkdir(parents=True)
    (here / "lmod" / "init" / "bash").write_text(MODULES.format(folder=here))
    (here / "evil").mkdir()
    (here / "evil" / "python").write_text("#!/bin/sh\necho evicted\n")
    (here / "evil" / "python").chmod(0o755)
    monkeypatch.setenv("MODULESHOME", str(here / "lmod"))
    return here


SHOW = """
import os, sys
print("ran", sys.argv[1:], sys.executable, os.getcwd())
print(repr(os.environ.get("NCCL_ALGO")), repr(os.environ.get("HF_HOME")), repr(os.environ.get("SEQ_LEN")))
"""


def with_shown_job(folder):
    """Let the script run a module that shows what it was started with, in place of the job."""
    package = folder / "shown" / "polarlm" / "launch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "job.py").write_text(SHOW)
    return str(folder / "shown")


def test_l03_l05_a_script_brings_back_modules_python_and_variables(modules, monkeypatch):
    monkeypatch.setenv("LOADEDMODULES", "conda:cray/2")
    monkeypatch.setenv("NCCL_ALGO", "Ring,Tree")
    monkeypatch.setenv("HF_HOME", "two words\nand 'lines' $HOME `id`")
    monkeypatch.setenv("SEQ_LEN", "32")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH") or "/some/where")
    assert submit("run.yaml --site polaris --nodes 2 --walltime 01:00:00 --until-done --train.seq-len 64") == 0
    script = Path("runs/demo/job.sh").read_text().replace(os.environ["PYTHONPATH"], with_shown_job(modules))
    Path("shown.sh").write_text(script)
    done = run_script("shown.sh", SEQ_LEN="32")
    assert (done.returncode, done.stderr) == (0, "")
    python, ran, variables = done.stdout.splitlines()
    assert python.startswith(f"python: {sys.executable} on ")
    command = f"'--until-done', 'runs/demo/job.sh', '--', '{sys.executable}', '-m', 'polarlm', 'train', 'runs/demo'"
    assert command in ran
    assert ran.endswith(f"{sys.executable} {os.getcwd()}")
    assert variables == repr("Ring,Tree") + " " + repr("two words\nand 'lines' $HOME `id`") + " None"
    assert "seq_len: 64" in Path("runs/demo/config.yaml").read_text(), "a flag counts before a variable, in the job too"
    assert (modules / "modules").read_text().splitlines() == [
        "module use --append /soft/modulefiles",
        "module load conda",
        "module load cray/2",
    ]


@pytest.mark.parametrize(
    ("loaded", "complaint"),
    [("missing-one", "module missing-one cannot be loaded on"), ("absent", "module absent cannot be loaded on")],
)
def test_l02_a_module_that_does_not_load_ends_the_job(loaded, complaint, modules, monkeypatch):
    monkeypatch.setenv("LOADEDMODULES", loaded)
    assert submit("run.yaml --site polaris --walltime 01:00:00") == 0
    done = run_script()
    assert done.returncode == 2
    assert f"error: {complaint}" in done.stderr


def test_l02_a_missing_module_command_or_python_ends_the_job(here, monkeypatch):
    monkeypatch.setenv("MODULESHOME", str(here / "nothing"))
    assert submit("run.yaml --site polaris --walltime 01:00:00") == 0
    done = run_script()
    assert done.returncode == 2
    assert "error: there is no module command on " in done.stderr
    assert submit("run.yaml --scheduler pbs --devices-per-node 1 --walltime 01:00:00") == 0
    text = Path("runs/demo-2/job.sh").read_text()
    Path("gone.sh").write_text(text.replace(f"python={sys.executable}", "python=/gone/bin/python"))
    done = run_script("gone.sh")
    assert done.returncode == 2
    assert "error: there is no /gone/bin/python (is its file system there?) on " in done.stderr


MPIEXEC = f"""#!{sys.executable} -S
import os, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("mpiexec version 1.3.4, revision 0000000"))
open({{folder!r}} + "/started", "a").write(" ".join(sys.argv[1:]) + "\\n")
start = sys.argv.index(sys.argv[sys.argv.index("--envall") + 1])
def task(rank):
    place = {{{{"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"}}}}
    return subprocess.Popen(sys.argv[start:], env=os.environ | place)
sys.exit(max([process.wait() for process in [task(0), task(1)]]))
"""


def test_a_submitted_run_trains_on_two_nodes(here, capsys):
    """The whole way, with stand-ins for qsub and mpiexec: the script as it was written, and two real ranks."""
    stand_in(here, "mpiexec", MPIEXEC.format(folder=str(here)))
    (here / "nodes").write_text("x3001c0s7b0n0\nx3001c0s7b1n0\n")
    flags = "--train.steps 6 --train.global-batch-size 2 --checkpoint.every 2"
    words = "run.yaml --scheduler pbs --nodes 2 --devices-per-node 1 --walltime 01:00:00"
    assert submit(f"{words} {flags}") == 0
    job = {"PBS_NODEFILE": str(here / "nodes"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    done = run_script(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", **job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 steps of 2 x 16 tokens, on 2 ranks" in done.stdout
    assert "job 100.polaris-pbs-01: step 6 of 6 is saved" in done.stdout
    assert (here / "started").read_text().startswith("-n 2 --ppn 1 --hostfile")
    assert sorted(path.name.split(".")[-2] for path in Path("runs/demo/logs").glob("*.log")) == ["0", "1"]
    (job_record,) = read_jobs(Path("runs/demo"))
    assert [(each.why, each.last_step) for each in job_record.tries] == [("done", 6)]
    events = [json.loads(line) for line in Path("runs/demo/events.jsonl").read_text().splitlines()]
    assert all(event["seconds"] > 0 for event in events if event["event"] == "save")


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_the_systems_own_python_does_not_come_before_a_modules_programs(here, monkeypatch, capsys):
    words = "run.yaml --scheduler pbs --devices-per-node 1 --walltime 01:00:00 --dry-run"
    assert submit(words) == 0
    assert 'export PATH="${python%/*}:$PATH"' in capsys.readouterr().out
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert submit(words) == 0
    assert "export PATH" not in capsys.readouterr().out
