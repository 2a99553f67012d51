"""Ranks that a launcher starts: what they find, where they write, and how their failures come back.

The launcher is a stand-in for srun that starts its tasks here, as srun does on its nodes: with a code it ends them all.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from cluster.processes import eventually
from launch.launched import living, logs

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
start = next(n for n, word in enumerate(sys.argv) if n and not word.startswith("--"))
tasks, each = int(options["ntasks"]), int(options["ntasks-per-node"])
def task(rank):
    own = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each, "SLURM_STEP_ID": 0,
           "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": f"{{each}}(x{{tasks // each}})"}}
    return subprocess.Popen(sys.argv[start:], env=os.environ | {{name: str(value) for name, value in own.items()}})
running = [task(rank) for rank in range(tasks)]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: [process.send_signal(number) for process in running])
codes = [None]
while None in codes and not any(codes):
    time.sleep(0.02)
    codes = [process.poll() for process in running]
if any(codes) and os.environ.get("KEEPS_WAITING") != "1":
    for process in running:
        process.terminate()
sys.exit(max(abs(process.wait()) for process in running))
"""


@pytest.fixture
def launch(tmp_path, start_process):
    """`polarlm launch` in a job of two nodes with two tasks each, of a Python script as the program."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)

    def start(text, flags="", **environment):
        script = tmp_path / "rank.py"
        head = "import os, signal, subprocess, sys, time\nRANK = int(os.environ.get('RANK', -1))\n"
        script.write_text(head + textwrap.dedent(text))
        words = [sys.executable, "-m", "polarlm", "launch", "--ranks-per-node", "2", *flags.split(), "--"]
        job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1000", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        return start_process([*words, sys.executable, str(script)], cwd=tmp_path, env=os.environ | job | environment)

    return start


def test_each_rank_learns_its_place_and_writes_where_it_should(launch, tmp_path):
    process = launch(
        """
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
        print(*(os.environ[name] for name in names))
        print("err", RANK, file=sys.stderr)
        """
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "0 4 0 2 n1 16000\n", "")
    assert logs(tmp_path, 0) == "err 0\n"
    assert sorted(logs(tmp_path, 3).splitlines()) == ["3 4 1 2 n1 16000", "err 3"]


def test_l04_l13_the_first_failing_ranks_code_and_traceback_come_back(launch, tmp_path):
    process = launch(
        """
        if RANK == 2:
            time.sleep(0.5)
            try:
                raise ValueError("the cause")
            finally:
                sys.stderr.write("\\xff\\n")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("the victim's last words"))
        time.sleep(300)
        """
    )
    start = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - start < 100  # far less than they would sleep, on a busy machine too
    assert process.returncode == 1
    assert "ValueError: the cause" in err
    assert "error: rank 2 on " in err.splitlines()[-1]
    assert "victim" not in err
    assert eventually(lambda: not living(tmp_path))


def test_l01_output_that_is_no_text_does_not_matter(launch):
    process = launch("os.write(2, b'\\xff\\xfe broken'); sys.exit(7 if RANK == 1 else 0)")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 7
    assert "broken" in err


def test_l13_a_launcher_that_lets_the_others_wait_is_ended(launch, tmp_path):
    code = "from polarlm.launch.start import remote; remote.GRACE_S = 0.5"
    (tmp_path / "sitecustomize.py").write_text(code)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    process = launch("if RANK == 1: sys.exit(9)\ntime.sleep(300)", KEEPS_WAITING="1", PYTHONPATH=path)
    start = time.monotonic()
    process.communicate(timeout=120)
    assert time.monotonic() - start < 100  # far less than they would sleep, on a busy machine too
    assert process.returncode == 9
    assert eventually(lambda: not living(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_l14_a_signal_reaches_every_rank_and_nothing_is_left(number, launch, tmp_path):
    process = launch(
        """
        def save(number, frame):
            print("told", number, file=sys.stderr)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", file=sys.stderr, flush=True)
        time.sleep(300)
        """
    )
    assert eventually(lambda: all("ready" in logs(tmp_path, rank) for rank in range(4)))
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert [logs(tmp_path, rank) for rank in range(4)] == ["ready\ntold 15\n"] * 4
    assert eventually(lambda: not living(tmp_path))


def test_a_program_that_cannot_be_started_says_so(launch, tmp_path):
    program = tmp_path / "bin" / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    words = [sys.executable, "-m", "polarlm", "launch", "--ranks-per-node", "1", "--", "broken"]
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    said = subprocess.run(words, cwd=tmp_path, env=os.environ | job, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert "error: broken: cannot be started" in said.stderr


def test_logs_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    words = [sys.executable, "-m", "polarlm.launch.enter", "--logs", str(tmp_path / "file" / "logs"), "--", "true"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert f"error: {tmp_path}/file/logs: cannot be written on " in said.stderr
    assert said.stderr.count("\n") == 1


def test_a_rank_whose_launcher_is_gone_ends(tmp_path):
    middle = f"{sys.executable} -m polarlm.launch.enter --logs {tmp_path}/logs -- sleep 300 & echo started; read line"
    shell = subprocess.Popen(["sh", "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    assert shell.stdout.readline() == b"started\n"
    assert eventually(lambda: (tmp_path / "logs").exists())
    shell.kill()
    shell.communicate()
    assert eventually(lambda: not living(tmp_path))


def test_a_rank_whose_launcher_is_gone_from_the_start_ends(tmp_path):
    enter = f"{sys.executable} -m polarlm.launch.enter --logs {tmp_path}/logs -- sleep 300"
    subprocess.run(["sh", "-c", f"{enter} &"], stdin=subprocess.DEVNULL, cwd=tmp_path, check=True)
    assert eventually(lambda: (tmp_path / "logs").exists())
    assert eventually(lambda: not living(tmp_path))


def test_what_an_earlier_launch_left_blames_nobody(launch, tmp_path):
    launch("sys.exit(3)").communicate(timeout=120)
    assert list((tmp_path / "logs").glob("*.ended"))
    process = launch("pass")
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0
