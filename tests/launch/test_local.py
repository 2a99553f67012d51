"""The ranks of one machine end together, show the cause and leave no process: tried with small scripts as ranks."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cluster.processes import eventually
from launch.launched import living, logs
from polarlm.config import UserError
from polarlm.launch import run_local
from polarlm.launch.start import local

LAUNCH = "import sys, os, pathlib; from polarlm.launch import run_local; from polarlm.launch.start import local\n"
LAUNCH += "if __name__ == '__main__':\n"
LAUNCH += "    local.GRACE_S = float(os.environ.get('GRACE_S', local.GRACE_S))\n"
LAUNCH += "    sys.exit(run_local([sys.executable, sys.argv[1]], int(sys.argv[2]), pathlib.Path('logs'), os.environ))\n"


def script(folder: Path, text: str) -> Path:
    path = folder / "rank.py"
    path.write_text(
        "import os, signal, subprocess, sys, time\nRANK = int(os.environ['RANK'])\n" + textwrap.dedent(text)
    )
    return path


@pytest.fixture
def launch(tmp_path, start_process):
    """Start a launcher of `ranks` ranks of a script in a process of its own."""

    def start(text: str, ranks: int = 2, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-c", LAUNCH, str(script(tmp_path, text)), str(ranks)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")} | environment
        return start_process(command, cwd=tmp_path, env=environ)

    return start


def test_each_rank_learns_its_place_and_writes_where_it_should(launch, tmp_path):
    launcher = launch(
        """
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS".split()
        print("out", *(os.environ[name] for name in names))
        print("err", RANK, file=sys.stderr)
        """,
        ranks=3,
        OMP_NUM_THREADS="5",
    )
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0
    assert (out, err) == ("out 0 3 0 3 127.0.0.1 5\n", "")
    assert logs(tmp_path, 0) == "err 0\n"
    for rank in (1, 2):
        assert sorted(logs(tmp_path, rank).splitlines()) == [f"err {rank}", f"out {rank} 3 {rank} 3 127.0.0.1 5"]


def test_threads_share_the_cores_unless_the_user_chose(launch):
    cores = len(os.sched_getaffinity(0))
    text = "print(os.environ['OMP_NUM_THREADS'])"
    assert launch(text, 2, OMP_NUM_THREADS="").communicate(timeout=120)[0] == f"{max(1, cores // 2)}\n"
    assert launch(text, 64, OMP_NUM_THREADS="").communicate(timeout=120)[0] == "1\n"


def test_two_runs_at_once_each_hold_their_own_port(launch):
    text = """
    import socket
    if RANK == 0:
        held = socket.socket(fileno=int(os.environ["POLARLM_LISTEN_FD"]))
        print(held.getsockname()[1] == int(os.environ["MASTER_PORT"]), os.environ["MASTER_PORT"], flush=True)
        held.accept()[0].sendall(b"met")
    else:
        assert "POLARLM_LISTEN_FD" not in os.environ
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        assert socket.create_connection(place).recv(3) == b"met"
    """
    runs = [launch(text), launch(text)]
    outputs = [run.communicate(timeout=120)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert [held for held, _ in outputs] == ["True", "True"]
    assert outputs[0][1] != outputs[1][1]


def test_a_first_rank_that_is_gone_leaves_nobody_waiting_for_it(launch):
    launcher = launch(
        """
        import socket
        if RANK == 1:
            time.sleep(0.5)
            try:
                socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            except ConnectionRefusedError:
                sys.exit(0)
            sys.exit("connected to nobody")
        """
    )
    launcher.communicate(timeout=120)
    assert launcher.returncode == 0


def test_a_port_and_address_the_user_set_are_kept(launch):
    text = "print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], 'POLARLM_LISTEN_FD' in os.environ)"
    launcher = launch(text, MASTER_ADDR="localhost", MASTER_PORT="45678", POLARLM_LISTEN_FD="99")
    assert launcher.communicate(timeout=120)[0] == "localhost 45678 False\n"


def test_empty_variables_count_as_unset(launch):
    text = "print(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']) > 1024)"
    assert launch(text, MASTER_ADDR="", MASTER_PORT="").communicate(timeout=120)[0] == "127.0.0.1 True\n"


@pytest.mark.parametrize("wrong", [{"MASTER_PORT": "http"}, {"MASTER_PORT": "70000"}, {"MASTER_ADDR": "192.0.2.1"}])
def test_a_place_that_cannot_be_is_a_users_mistake(wrong, tmp_path):
    with pytest.raises(UserError, match=next(iter(wrong))):
        run_local([sys.executable, "-c", ""], 1, tmp_path, wrong)


def test_a_failing_rank_ends_the_others_and_its_traceback_is_shown(launch, tmp_path):
    launcher = launch(
        """
        if RANK == 1:
            time.sleep(0.2)
            raise ValueError("the cause")
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", sys.argv[0]])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(300)
        """,
        ranks=3,
    )
    start = time.monotonic()
    _, err = launcher.communicate(timeout=120)
    assert time.monotonic() - start < 100  # far less than they would sleep, on a busy machine too
    assert launcher.returncode == 1
    assert "ValueError: the cause" in err
    assert "rank 1 on " in err.splitlines()[-1]
    assert not living(tmp_path)


def test_a_rank_that_will_not_end_is_killed(launch, tmp_path):
    launcher = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if RANK == 1:
            time.sleep(0.5)
            sys.exit(9)
        time.sleep(300)
        """,
        GRACE_S="0.5",
    )
    launcher.communicate(timeout=120)
    assert launcher.returncode == 9
    assert not living(tmp_path)


VICTIMS_WORDS = [
    "RuntimeError('[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5678')",
    "ConnectionResetError(104, 'Connection reset by peer')",
    "BrokenPipeError(32, 'Broken pipe')",
]


@pytest.mark.parametrize("error", VICTIMS_WORDS)
def test_the_cause_is_told_from_a_victim_that_died_before_it(error, launch):
    launcher = launch(
        f"""
        if RANK == 0:
            raise {error}
        time.sleep(0.3)
        try:
            {{}}["x"]
        except KeyError as missing:
            raise RuntimeError("the cause") from missing
        """
    )
    _, err = launcher.communicate(timeout=120)
    assert "KeyError: 'x'" in err
    assert "RuntimeError: the cause" in err
    assert "rank 1 on " in err.splitlines()[-1]


def test_torchs_prefix_hides_no_victim(launch):
    launcher = launch(
        """
        if RANK == 0:
            sys.exit("[rank0]: Traceback (most recent call last):\\n[rank0]:   File x\\n"
                     "[rank0]: torch.distributed.DistBackendError: gone\\n[rank0]: frame 0")
        time.sleep(0.3)
        sys.exit("[rank1]: Traceback (most recent call last):\\n[rank1]:   File y\\n[rank1]: ValueError: the cause\\n"
                 "[rank1]:[W ProcessGroupNCCL.cpp] Warning: the group was not destroyed")
        """
    )
    _, err = launcher.communicate(timeout=120)
    assert "\nValueError: the cause\n" in err
    assert "gone" not in err


def test_death_by_a_signal_is_named(launch):
    launcher = launch(
        """
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
        """
    )
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "rank 1 on" in err
    assert "SIGKILL" in err


def test_a_users_mistake_is_shown_once_as_its_line(launch):
    launcher = launch(
        """
        print("some warning\\nerror: train.seq_len: 7 is odd; give 8", file=sys.stderr)
        sys.exit(2)
        """
    )
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 2
    assert err == "error: train.seq_len: 7 is odd; give 8\n"


SAVES_ON_SIGTERM = """
def save(number, frame):
    print("told", number, file=sys.stderr)
    time.sleep(0.3)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, save)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", sys.argv[0]])
print("ready", file=sys.stderr)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_once_and_nothing_is_left(number, launch, tmp_path):
    launcher = launch(SAVES_ON_SIGTERM, ranks=3)
    assert eventually(lambda: all("ready" in logs(tmp_path, rank) for rank in range(3)))
    launcher.send_signal(number)
    launcher.communicate(timeout=120)
    assert launcher.returncode == 0
    told = signal.SIGTERM if number == signal.SIGINT else number
    assert [logs(tmp_path, rank) for rank in range(3)] == [f"ready\ntold {told.value}\n"] * 3
    assert not living(tmp_path)


def test_a_terminals_ctrl_c_reaches_the_launcher_alone(launch, tmp_path):
    launcher = launch(SAVES_ON_SIGTERM)
    assert eventually(lambda: all("ready" in logs(tmp_path, rank) for rank in range(2)))
    group = os.getpgid(launcher.pid)
    ranks = [pid for pid in living(tmp_path) if pid != launcher.pid]
    assert len(ranks) == 4  # two ranks, and a child of each
    assert all(os.getpgid(pid) != group for pid in ranks)


def test_a_second_ctrl_c_ends_ranks_that_will_not_stop(launch, tmp_path):
    launcher = launch(
        """
        signal.signal(signal.SIGTERM, lambda *_: print("told", file=sys.stderr))
        print("ready", file=sys.stderr)
        while True:
            time.sleep(1)
        """
    )
    assert eventually(lambda: all("ready" in logs(tmp_path, rank) for rank in range(2)))
    launcher.send_signal(signal.SIGINT)
    assert eventually(lambda: all("told" in logs(tmp_path, rank) for rank in range(2)))
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=120)
    assert launcher.returncode == 130
    assert not living(tmp_path)


def test_ranks_stopped_while_they_still_start_explain_nothing(launch, tmp_path):
    launcher = launch("print('ready', file=sys.stderr); time.sleep(300)")
    assert eventually(lambda: all("ready" in logs(tmp_path, rank) for rank in range(2)))
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert err == ""


def test_ctrl_c_while_ranks_still_start_is_told_by_the_code(launch, tmp_path):
    launcher = launch("print('ready', file=sys.stderr); time.sleep(300)")
    assert eventually(lambda: all("ready" in logs(tmp_path, rank) for rank in range(2)))
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=120)
    assert launcher.returncode == 130


def test_the_launchers_own_sigkill_leaves_nothing(launch, tmp_path):
    launcher = launch(SAVES_ON_SIGTERM)
    assert eventually(lambda: all("ready" in logs(tmp_path, rank) for rank in range(2)))
    assert len(living(tmp_path)) == 5  # the launcher, two ranks, and a child of each
    launcher.kill()
    launcher.wait()
    assert eventually(lambda: not living(tmp_path))


def test_a_child_that_a_finished_rank_left_is_ended(launch, tmp_path):
    launcher = launch("subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', sys.argv[0]])")
    launcher.wait(timeout=120)
    assert launcher.returncode == 0
    assert not living(tmp_path)


def test_signals_are_the_callers_own_again(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert run_local([sys.executable, "-c", ""], 1, tmp_path, os.environ) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_rank_is_heard_though_its_folder_has_gone(tmp_path, capsys):
    path = script(tmp_path, "import shutil; shutil.rmtree(sys.argv[1]); sys.stderr.write('error: gone'); sys.exit(2)")
    words = [sys.executable, str(path), str(tmp_path / "logs")]
    assert run_local(words, 1, tmp_path / "logs", os.environ) == 2
    assert capsys.readouterr().err == "error: gone\n"


def test_a_log_that_goes_on_blames_only_what_is_new(tmp_path, capsys):
    for text in ("print('old')", "import sys; sys.exit('new')"):
        run_local(
            [sys.executable, "-c", text.replace("print(", "__import__('sys').stderr.write(")], 1, tmp_path, os.environ
        )
    assert "old" not in capsys.readouterr().err
    assert "old" in next(tmp_path.glob("*.0.log")).read_text()


def test_torch_meets_on_the_socket_that_is_handed_over(launch):
    assert local.LISTEN_FD == "POLARLM_LISTEN_FD"
    launcher = launch(
        """
        import datetime
        from torch.distributed import TCPStore
        handed = {"master_listen_fd": int(os.environ["POLARLM_LISTEN_FD"])} if RANK == 0 else {}
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, RANK == 0,
                         timeout=datetime.timedelta(seconds=30), **handed)
        assert store.libuvBackend
        store.set(f"from {RANK}", str(RANK * 10))
        print(store.get(f"from {1 - RANK}").decode(), flush=True)
        store.set(f"read by {RANK}", "")
        store.wait([f"read by {1 - RANK}"])
        """
    )
    out, err = launcher.communicate(timeout=120)
    assert (launcher.returncode, out) == (0, "10\n"), err
