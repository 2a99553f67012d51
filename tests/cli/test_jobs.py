"""`polarlm jobs` and `polarlm logs`: what a run's files tell, and what a scheduler is asked only where they cannot."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from polarlm.cli import main
from polarlm.launch.jobs.record import write_job_event

REQUEST = {"nodes": 2, "walltime_s": 3600}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the run demo, of 100 steps, saved at 30; no scheduler's program is on the PATH."""
    run = tmp_path / "runs" / "demo"
    (run / "checkpoints" / "step-30").mkdir(parents=True)
    (run / "checkpoints" / "step-30" / "complete.json").touch()
    (run / "config.yaml").write_text("model: {layers: 1, hidden: 16, heads: 2}\ntrain: {steps: 100}\n")
    (run / "logs").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return run


def event(run, name, job, at, scheduler="slurm", **facts):
    shared = {"scheduler": scheduler, **REQUEST} if name != "ended" else {}
    extra = {"by": "user", "queue": None} if name == "submitted" else {}
    write_job_event(run, name, job, at, **shared, **extra, **facts)


def stand_in(here, name, text):
    path = here.parent.parent / "bin" / name
    path.write_text(f"#!{sys.executable} -S\n{text}\n")
    path.chmod(0o755)


def table(capsys):
    """The rows by job, each its words; and the lines below."""
    assert main(["jobs"]) == 0
    rows, sums = capsys.readouterr().out.split("\n\n")
    return {row.split()[1]: re.split(r"  +", row)[2:] for row in rows.splitlines()}, sums.splitlines()


def test_a_jobs_end_its_node_hours_and_steps_are_in_the_runs_own_files(here, capsys):
    stand_in(here, "squeue", f"open({str(here / 'asked')!r}, 'w')")
    event(here, "submitted", "100", 1000.0)
    event(here, "began", "100", 2000.0, left_s=3600, step=0)
    event(here, "ended", "100", 2900.0, step=10, code=7, why="crash", left_s=2700)
    event(here, "began", "100", 2960.0, left_s=2640, step=10)
    event(here, "ended", "100", 5460.0, step=30, code=0, why="walltime", left_s=140)
    rows, sums = table(capsys)
    assert rows["100"] == ["walltime", "2", "01:00:00", "1.89", "0-30"]  # 3400 s on 2 nodes
    assert sums == ["demo: 30 of 100 steps saved, 1.89 node-hours in 1 job"]
    assert not (here / "asked").exists(), "nothing is left to ask a scheduler"


def test_slurm_is_asked_about_the_others_by_their_whole_number(here, capsys):
    stand_in(here, "squeue", "print('123 PENDING\\n1234 RUNNING\\n77 RUNNING')")
    now = time.time()
    for job in ("123", "1234", "12345"):
        event(here, "submitted", job, now - 2000)
    event(here, "began", "1234", now - 1800, left_s=3600, step=20)
    rows, _ = table(capsys)
    assert rows["123"][:1] == ["queued"]
    assert rows["1234"] == ["running", "2", "01:00:00", "1.00", "20-30"]
    assert rows["12345"][:1] == ["gone"], "squeue does not know it"


QSTAT = """\
Job Id: 123.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov
    Job_Name = demo
    job_state = H
    Variable_List = A=1,job_state,
\tB=2

Job Id: 1234.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov
    job_state = R
"""


def test_pbs_is_asked_too_though_it_has_forgotten_one(here, capsys):
    stand_in(here, "qstat", f"import sys; print({QSTAT!r}); sys.exit(153)")
    now = time.time()
    for job in ("123.polaris-pbs-01", "1234.polaris-pbs-01", "12.polaris-pbs-01"):
        event(here, "submitted", job, now, scheduler="pbs")
    rows, _ = table(capsys)
    assert [row[0] for row in list(rows.values())[1:]] == ["waiting", "running", "gone"]


@pytest.mark.parametrize(("name", "program"), [("slurm", "squeue"), ("pbs", "qstat")])
def test_a_scheduler_that_does_not_answer_has_not_forgotten_a_job(name, program, here, capsys):
    stand_in(here, program, "import sys; sys.exit('cannot connect to server')")
    event(here, "submitted", "100", time.time(), scheduler=name)
    assert table(capsys)[0]["100"][0] == "submitted"


def test_without_a_scheduler_the_files_say_what_they_can(here, capsys):
    now = time.time()
    for job, began in (("1", now - 36000), ("2", now - 1800)):
        event(here, "submitted", job, began - 10)
        event(here, "began", job, began, left_s=3600, step=0)
    (here / "metrics.jsonl").write_text('{"step": 30}\n')
    os.utime(here / "metrics.jsonl", (now - 34200,) * 2)  # the first job's last sign, half an hour after its begin
    rows, sums = table(capsys)
    assert rows["1"][0] == "killed"
    assert rows["1"][3] == "1.00"
    assert rows["2"][0] == "running?"
    assert sums == ["demo: 30 of 100 steps saved, 2.00 node-hours in 2 jobs"]


def test_a_run_without_jobs_is_said(here, capsys):
    assert main(["jobs"]) == 2
    assert main(["jobs", "demo"]) == 2
    assert capsys.readouterr().err == (
        "error: runs: no run here has a job yet: see `polarlm submit`\n"
        "error: runs/demo: no jobs.jsonl there, so no job was submitted for it: see `polarlm submit`\n"
    )


def log(here, name, text):
    (here / "logs" / name).write_bytes(text.encode("latin-1"))


def test_the_first_ranks_newest_log_is_shown_by_default(here, capsys):
    log(here, "n1.0.log", "old\n")
    os.utime(here / "logs" / "n1.0.log", (1, 1))
    log(here, "n2.0.log", "".join(f"line {n}\n" for n in range(100)) + "not UTF-8: \xff\n")
    log(here, "n2.1.log", "other\n")
    assert main(["logs", "demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (40, "line 61", "not UTF-8: \ufffd")
    assert main(["logs", "runs/demo", "-n", "1", "--host", "n1", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "old\n"
    assert main(["logs", "demo", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "other\n"


def test_every_rank_of_a_host_is_shown_under_its_name(here, capsys):
    for rank in (0, 10, 2):
        log(here, f"n1.domain.{rank}.log", f"rank {rank}\n")
    assert main(["logs", "demo", "--host", "n1.domain"]) == 0
    assert capsys.readouterr().out == (
        "==> runs/demo/logs/n1.domain.0.log <==\nrank 0\n\n==> runs/demo/logs/n1.domain.2.log <==\nrank 2\n\n"
        "==> runs/demo/logs/n1.domain.10.log <==\nrank 10\n"
    )


def test_a_log_that_is_not_there_is_said_with_those_that_are(here, capsys):
    log(here, "job-100.log", "error: module conda cannot be loaded on n1\n")
    assert main(["logs", "demo"]) == 2
    log(here, "n1.0.log", "")
    assert main(["logs", "demo", "--host", "n2"]) == 2
    assert main(["logs", "demo", "-n", "0"]) == 2
    assert capsys.readouterr().err == (
        "error: runs/demo/logs: no log of rank 0 (no rank has started); see runs/demo/logs/job-100.log\n"
        "error: runs/demo/logs: no log of any rank on n2 (hosts n1)\n"
        "error: --lines: 0 lines cannot be; give at least 1\n"
    )


def test_a_followed_log_goes_on_in_the_next_jobs_and_ends_with_ctrl_c(here):
    log(here, "n1.0.log", "first\n")
    os.utime(here / "logs" / "n1.0.log", (1, 1))
    command = [sys.executable, "-m", "polarlm", "logs", "demo", "-f"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert following.stdout.readline() == "first\n"
        with (here / "logs" / "n1.0.log").open("a") as file:
            file.write("half of ")
            file.flush()
            time.sleep(0.7)
            file.write("a line\n")
        assert following.stdout.readline() == "half of a line\n"
        log(here, "n2.0.log", "next job\n")
        os.utime(here / "logs" / "n2.0.log", (time.time() + 5,) * 2)
        assert following.stdout.readline() == "next job\n"
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 130
        assert following.stderr.read() == ""
    finally:
        following.kill()
