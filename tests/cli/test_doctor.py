"""`polarlm doctor` on this machine, and on the two nodes of a job that a stand-in for srun starts."""

import json
import os
import sys

import pytest

from polarlm import cli
from polarlm.cli import doctor
from stand_ins import put_srun

# In place of the two ranks that load torch.
PROBE = """
import json, os, pathlib, sys
if os.environ["RANK"] == "0":
    folder = pathlib.Path(sys.argv[1])
    {lines}
"""
TORCH = '(folder / "torch.json").write_text(json.dumps({"torch": "2.11", "built_for": "", "torch_devices": 0}))'
EXCHANGE = '(folder / "exchange.json").write_text(json.dumps({"exchange_bytes_per_s": 5e9, "exchange_on": "air"}))'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.glob(".polarlm*"))


@pytest.fixture
def probe(tmp_path, monkeypatch):
    def say(*lines):
        (tmp_path / "probe.py").write_text(PROBE.format(lines="\n    ".join(lines)))
        monkeypatch.setattr(doctor, "_probe", lambda: [sys.executable, str(tmp_path / "probe.py")])

    say(TORCH, EXCHANGE)
    return say


def test_two_real_ranks_here_reach_each_other_whatever_their_tear_down_would_do(tmp_path, monkeypatch, capsys):
    abort = "import atexit, os, sys\n'polarlm.cli.probe' in sys.orig_argv and atexit.register(os.abort)\n"
    (tmp_path / "sitecustomize.py").write_text(abort)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    code = cli.main(["doctor", "--json"])
    found = {each["topic"]: each for each in json.loads(capsys.readouterr().out)}
    assert code == int(any(each["status"] == "fault" for each in found.values()))
    assert found["torch"]["what"].startswith(__import__("torch").__version__)
    assert found["exchange"]["status"] == "ok"
    assert "two ranks all-reduce at" in found["exchange"]["what"]


def test_a_torch_that_cannot_be_loaded_is_a_finding(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    why = "libcudart.so.12: cannot open shared object file"
    (tmp_path / "broken" / "torch" / "__init__.py").write_text(f"raise OSError({why!r})\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{os.environ.get('PYTHONPATH', '')}")
    assert cli.main(["doctor"]) == 1
    assert f"fault    torch      cannot be used: OSError: {why} — " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["raise ImportError('libtorch.so: no such file')"], "torch      cannot be used: ImportError: libtorch.so: no"),
        ([TORCH, "raise RuntimeError('no interface')"], "exchange   two ranks cannot all-reduce: RuntimeError: no int"),
        (["os.kill(os.getpid(), 11)"], "torch      cannot be used: rank 0 on "),
        (
            [TORCH, "import signal; os.kill(os.getpid(), signal.SIGALRM)"],
            "two ranks cannot all-reduce: no end in 2",
        ),
    ],
)
def test_a_broken_torch_is_a_finding_and_no_crash(lines, words, probe, capsys):
    probe(*lines)
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr()
    assert words in said.out
    assert said.err == ""


def test_a_disk_that_is_full_everywhere_is_a_finding(monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", list)
    monkeypatch.setenv("TMPDIR", "/proc")
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr()
    assert "fault    torch      cannot be used: not tried, for want of a folder" in said.out
    assert "fault    temporary  /proc" in said.out
    assert said.err == ""


@pytest.mark.parametrize("nodes", ["0", "-1", "2"])
def test_a_number_of_nodes_that_cannot_be_is_refused(nodes, capsys):
    assert cli.main(["doctor", "--nodes", nodes]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: --nodes: {nodes} cannot be")
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_every_node_of_a_job_is_looked_at(probe, tmp_path, monkeypatch, capfd):
    put_srun(tmp_path, monkeypatch, "n[1-2]")
    assert cli.main(["doctor"]) == 0, capfd.readouterr()
    lines = capfd.readouterr().out.splitlines()
    assert any("exchange   n1 and 1 more: two ranks all-reduce at 5.00 GB/s (air)" in line for line in lines)
    assert any(line.startswith("ok       clocks     2 hosts agree within 0.") for line in lines)
    assert lines[-1] == "ok       exchange   one rank on each of 2 nodes all-reduce at 5.00 GB/s (air)"


def test_nodes_that_do_not_reach_each_other_are_a_fault(probe, tmp_path, monkeypatch, capfd):
    probe(TORCH, EXCHANGE)
    real = (tmp_path / "probe.py").read_text()
    (tmp_path / "probe.py").write_text(
        f"{real}\nif os.environ.get('SLURM_STEP_ID') and 'between' in sys.argv[1]: 1 / 0\n"
    )
    put_srun(tmp_path, monkeypatch, "n[1-2]")
    assert cli.main(["doctor"]) == 1
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("fault    exchange   one rank on each of 2 nodes cannot all-reduce: ZeroDivisionError")


def test_a_node_that_says_nothing_is_a_fault_by_name(probe, tmp_path, monkeypatch, capfd):
    put_srun(tmp_path, monkeypatch, "n[1-2]", silent="1")
    assert cli.main(["doctor"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("fault    launch     n2: nothing is heard of it; the launcher ended with code 0 — ")
    assert any("ok       exchange   two ranks all-reduce" in line for line in lines)


def test_a_node_without_python_does_not_end_the_others(probe, tmp_path, monkeypatch, capfd):
    put_srun(tmp_path, monkeypatch, "n[1-3]", without_python="0")
    assert cli.main(["doctor"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("fault")] == [lines[0]]
    assert lines[0].startswith("fault    launch     n1: nothing is heard of it")
    assert any("exchange   n2 and 1 more: two ranks all-reduce" in line for line in lines)
