"""One job of a run, tried with a small program in place of the training and stand-ins in place of the scheduler."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from polarlm.config import dump_run, load_run
from polarlm.launch import job as job_module
from polarlm.launch.job import Assignment, run_job, walltime_end
from polarlm.launch.jobs.record import read_jobs, saved_step, write_job_event

STEPS = 40

# Takes steps, saves every tenth, and on SIGUSR1 saves and ends, as training does; `what` says what else, by try.
TRAINER = f"""
import json, os, signal, sys, time
from pathlib import Path
folder, what = Path(sys.argv[1]), json.loads(sys.argv[2])
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
tries = folder / "tries"
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
happens = what.get(str(len(tries.read_text())), what.get("any", {{}}))
marks = [int(mark.parent.name[5:]) for mark in folder.glob("checkpoints/step-*/complete.json")]
step = max(marks, default=0)
def save():
    (folder / "checkpoints" / f"step-{{step}}").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / f"step-{{step}}" / "complete.json").touch()
while step < {STEPS} and not asked:
    step += 1
    time.sleep(happens.get("step_s", 0.005))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({{"step": step, "step_time_s": 0.005}}) + "\\n")
    if step == happens.get("crash_at"):
        sys.exit(happens["code"])
    if step == happens.get("kill_at"):
        os.kill(os.getpid(), signal.SIGKILL)
    if step == happens.get("signal_at"):
        os.kill(os.getppid(), happens["signal"])
    if step == happens.get("stop_file_at"):
        (folder / "stop").touch()
    if step % 10 == 0:
        save()
save()
"""


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "POLL_S", 0.02)
    flags = "--model.layers 1 --model.hidden 16 --model.heads 2 --train.steps 40 --model.vocab-size 257"
    config = load_run(None, environment={}, flags=flags.split(), devices=1).config
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_run(config))
    (folder / "job.sh").write_text("#!/bin/bash\n")
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/submitted\nenv > {tmp_path}/environment\necho "900;cluster"\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return folder


def assignment(folder, what=None, walltime_s=600, left_s=None, **facts):
    command = [sys.executable, "-S", "-E", "-c", TRAINER, str(folder), json.dumps(what or {})]
    standard = {
        "folder": folder,
        "command": command,
        "job": "17",
        "scheduler": "slurm",
        "nodes": 2,
        "walltime_s": walltime_s,
        "ends_at": time.time() + (walltime_s if left_s is None else left_s),
        "is_chain": False,
        "next_script": None,
        "retry_wait_s": 0.2,
    }
    return Assignment(**standard | facts)


def tries(folder):
    return [each for job in read_jobs(folder) for each in job.tries]


def submitted(folder):
    path = folder.parent / "submitted"
    return path.read_text().splitlines() if path.exists() else []


def test_a_run_is_trained_to_its_end_and_written_down(run_folder, capfd):
    assert run_job(assignment(run_folder)) == 0
    (only,) = tries(run_folder)
    assert (only.first_step, only.last_step, only.code, only.why) == (0, STEPS, 0, "done")
    assert "job 17: step 40 of 40 is saved" in capfd.readouterr().out
    assert run_job(assignment(run_folder)) == 0
    assert len(tries(run_folder)) == 1, "a job of a finished run starts nothing"
    assert "all 40 steps are done" in capfd.readouterr().out


def test_it_is_asked_to_save_before_the_walltime_ends(run_folder, capfd):
    assert run_job(assignment(run_folder, {"any": {"step_s": 0.1}}, walltime_s=10, left_s=3.0)) == 0
    (only,) = tries(run_folder)
    assert (only.why, only.code) == ("walltime", 0)
    assert 0 < only.last_step < STEPS
    assert only.ends_at > only.ended > only.ends_at - 1.9
    assert "walltime: asks the run to save and end" in capfd.readouterr().out
    assert submitted(run_folder) == [], "the next job was not asked for"


def test_until_done_it_submits_the_next_job_while_steps_remain(run_folder, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_CONF", "/etc/its.conf")
    what = {"any": {"step_s": 0.1}}
    script = run_folder / "job.sh"
    assert run_job(assignment(run_folder, what, walltime_s=10, left_s=3.0, is_chain=True, next_script=script)) == 0
    assert submitted(run_folder) == [f"--dependency=afterany:17 --parsable {script}"]
    (own, following) = read_jobs(run_folder)
    assert (own.tries[0].why, following.id, following.by, following.nodes) == ("walltime", "900", "job", 2)
    environment = (run_folder.parent / "environment").read_text()
    assert "SLURM_NTASKS" not in environment, "the next job has a size of its own"
    assert "SLURM_CONF=/etc/its.conf" in environment
    # The next one goes on, ends the run and submits none.
    assert run_job(assignment(run_folder, job="900", is_chain=True, next_script=script)) == 0
    assert (tries(run_folder)[1].first_step, tries(run_folder)[1].why) == (tries(run_folder)[0].last_step, "done")
    assert len(submitted(run_folder)) == 1


def test_a_scheduler_that_takes_no_job_from_here_is_said_and_ends_nothing(run_folder, capfd):
    (run_folder.parent / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: not from here' >&2\nexit 1\n")
    what = {"any": {"step_s": 0.1}}
    job = assignment(run_folder, what, walltime_s=10, left_s=3.0, is_chain=True, next_script=run_folder / "job.sh")
    assert run_job(job) == 0
    assert "error: the next job is not submitted: sbatch refused the job: sbatch: error: not from here" in (
        capfd.readouterr().out
    )


@pytest.mark.parametrize(("number", "why"), [(signal.SIGUSR1, "walltime"), (signal.SIGTERM, "cancelled")])
def test_the_schedulers_signals_reach_the_run_and_are_told_apart(number, why, run_folder):
    what = {"any": {"signal_at": 3, "signal": int(number), "step_s": 0.02}}
    job = assignment(run_folder, what, is_chain=True, next_script=run_folder / "job.sh")
    assert run_job(job) == 0
    (only,) = tries(run_folder)
    assert only.why == why
    assert 3 <= only.last_step < STEPS
    assert len(submitted(run_folder)) == (why == "walltime"), "who cancels a job wants no next one"


def test_the_stop_file_ends_the_run_after_a_save_and_the_chain(run_folder, monkeypatch):
    monkeypatch.setattr(job_module, "LOOK_EVERY_S", 0.05)
    what = {"any": {"stop_file_at": 3, "step_s": 0.05}}
    job = assignment(run_folder, what, is_chain=True, next_script=run_folder / "job.sh")
    assert run_job(job) == 0
    (only,) = tries(run_folder)
    assert (only.why, only.code) == ("stop file", 0)
    assert 3 <= only.last_step == saved_step(run_folder) < STEPS
    assert run_job(assignment(run_folder, job="18", is_chain=True)) == 0
    assert len(tries(run_folder)) == 1
    assert submitted(run_folder) == []


def test_l25_a_crash_is_tried_again_in_the_same_job_after_a_wait(run_folder, capfd):
    what = {"1": {"crash_at": 15, "code": 7}, "2": {"kill_at": 25}}
    assert run_job(assignment(run_folder, what, is_chain=True, retry_wait_s=0.4)) == 0
    first, second, third = tries(run_folder)
    assert [(each.first_step, each.last_step, each.code, each.why) for each in (first, second, third)] == [
        (0, 10, 7, "crash"),
        (10, 20, 137, "crash"),
        (20, STEPS, 0, "done"),
    ]
    assert second.began - first.ended >= 0.39
    said = capfd.readouterr().out
    assert re.search(
        r"crashed, which was not the walltime \(exit code 7, 00:(10:00|09:\d\d) of the walltime left\)", said
    )


def test_l25_two_tries_without_a_new_step_end_the_chain(run_folder, capfd):
    what = {"1": {"crash_at": 15, "code": 7}, "any": {"crash_at": 15, "code": 7}}
    assert run_job(assignment(run_folder, what, is_chain=True, next_script=run_folder / "job.sh")) == 1
    assert [(each.first_step, each.last_step) for each in tries(run_folder)] == [(0, 10), (10, 10), (10, 10)]
    assert "2 tries saved no new step after step 10; the chain ends here" in capfd.readouterr().out
    assert submitted(run_folder) == []


def test_a_crash_near_the_walltimes_end_leaves_the_next_try_to_the_next_job(run_folder):
    what = {"any": {"crash_at": 3, "code": 7}}
    script = run_folder / "job.sh"
    job = assignment(run_folder, what, walltime_s=60, left_s=20, retry_wait_s=30, is_chain=True, next_script=script)
    assert run_job(job) == 7
    assert len(submitted(run_folder)) == 1


def test_a_job_that_is_no_chain_gives_the_programs_code_and_tries_once(run_folder):
    assert run_job(assignment(run_folder, {"any": {"crash_at": 3, "code": 7}})) == 7
    assert len(tries(run_folder)) == 1


def test_a_users_mistake_is_not_repeated(run_folder):
    what = {"any": {"crash_at": 1, "code": 2}}
    assert run_job(assignment(run_folder, what, is_chain=True, next_script=run_folder / "job.sh")) == 2
    assert run_job(assignment(run_folder, what, job="18", is_chain=True)) == 2
    assert [each.why for each in tries(run_folder)] == ["mistake"]
    assert submitted(run_folder) == []


@pytest.mark.parametrize(("silent_s", "why"), [(0.5, "walltime"), (1800, "crash")])
def test_l26_a_job_that_was_killed_is_judged_by_the_next_one(silent_s, why, run_folder, capfd):
    """Its last sign of life at the walltime's end, or long before."""
    began, ends_at = time.time() - 3600, time.time() - 10
    request = {"scheduler": "slurm", "nodes": 2, "walltime_s": 3590}
    write_job_event(run_folder, "began", "16", began, **request, left_s=3590, step=0)
    (run_folder / "metrics.jsonl").write_text('{"step": 3, "step_time_s": 0.1}\n')
    os.utime(run_folder / "metrics.jsonl", (ends_at - silent_s,) * 2)
    assert run_job(assignment(run_folder)) == 0
    lost = tries(run_folder)[0]
    assert (lost.why, lost.code, lost.last_step) == (why, None, 0)
    assert lost.ended == pytest.approx(ends_at - silent_s, abs=1)
    said = "ended by the walltime (killed" if why == "walltime" else "crashed, which was not the walltime (killed"
    assert f"job 16, before: {said}" in capfd.readouterr().out


def test_a_requeued_job_goes_on_at_once_as_another_try(run_folder, monkeypatch, capfd):
    """Killed before it could say how it ended, and after it had: on other nodes, nothing has to be waited for."""
    what = {"1": {"kill_at": 25}}
    request = {"scheduler": "slurm", "nodes": 2, "walltime_s": 600}
    write_job_event(run_folder, "began", "17", time.time() - 100, **request, left_s=600, step=0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_job(assignment(run_folder, what, retry_wait_s=600)) == 137
    assert run_job(assignment(run_folder, is_chain=True, retry_wait_s=500)) == 0
    lost, killed, last = tries(run_folder)
    assert (lost.why, killed.first_step, killed.last_step, killed.why) == ("requeued", 0, 20, "crash")
    assert last.began - killed.ended < 500
    said = capfd.readouterr().out
    assert "job 17, before: ended by the scheduler, which has started the job again (killed, " in said
    assert "waits" not in said
    assert (last.first_step, last.why) == (20, "done")
    events = [json.loads(line) for line in (run_folder / "jobs.jsonl").read_text().splitlines()]
    assert [event["restarts"] for event in events if event["event"] == "began" and "restarts" in event] == [1, 1]


def test_the_schedulers_own_end_counts_before_the_scripts_arithmetic():
    assert walltime_end({"SLURM_JOB_END_TIME": "5000"}, 1000, 3600) == 5000
    assert walltime_end({"SLURM_JOB_END_TIME": ""}, 1000, 3600) == 4600


def test_nothing_outlives_a_job_that_is_killed(run_folder):
    what = json.dumps({"any": {"step_s": 60}})
    code = textwrap.dedent(
        f"""
        import sys
        from polarlm.launch.job import main
        sys.argv[1:] = [{str(run_folder)!r}, *"--scheduler slurm --nodes 1 --walltime-s 600 --began 4e9 --".split(),
                        sys.executable, "-S", "-E", "-c", {TRAINER!r}, {str(run_folder)!r}, {what!r}]
        sys.exit(main())
        """
    )
    driver = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not (run_folder / "tries").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _processes(run_folder)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 10
    while _processes(run_folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _processes(run_folder) == []


def _processes(folder: Path) -> list[int]:
    """Living processes that name the folder, but for the driver's own."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            is_dead = b"" in words[:1] or not words
        except (FileNotFoundError, ProcessLookupError):
            continue
        if not is_dead and str(folder).encode() in words:
            found.append(int(entry.name))
    return found
