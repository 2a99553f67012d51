"""What a job decides, without any process: why a try ended, whether another follows, how early to warn."""

import json
import os

import pytest

from polarlm.launch.jobs.chain import Ending, describe_ending, reason_to_end, why_ended
from polarlm.launch.jobs.job_table import job_table
from polarlm.launch.jobs.lead import lead_time, margin
from polarlm.launch.jobs.record import Try, read_jobs, saved_step, tries_since_submission, write_job_event

HOUR = 3600.0


def ending(code, left_s, asked=None, step=5, steps=10):
    return Ending(code, asked, left_s, HOUR, step, steps)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (ending(0, 900, step=10), "done"),
        (ending(0, 200, asked="walltime"), "walltime"),
        (ending(0, 200, asked="stop file"), "stop file"),
        (ending(0, 900, asked="cancelled"), "cancelled"),
        (ending(0, 20, asked="cancelled"), "walltime"),  # the scheduler's SIGTERM at the walltime's end
        (ending(2, 900), "mistake"),
        # The same codes, told apart by the time that was left.
        (ending(143, 3, asked="walltime"), "walltime"),
        (ending(137, 3), "walltime"),
        (ending(None, 0), "walltime"),
        (ending(143, 1800), "crash"),
        (ending(137, 1800), "crash"),
        (ending(None, 1800), "crash"),
        (ending(1, 3), "crash"),  # a traceback in the last seconds is no walltime
        (ending(1, 200, asked="walltime"), "crash"),
        (ending(1, 900, asked="cancelled"), "cancelled"),  # at saving, without the ranks of a node that failed
        (ending(None, 900, asked="requeued"), "requeued"),
        (ending(None, 0, asked="requeued"), "walltime"),
        (ending(138, 200, asked="walltime"), "walltime"),  # SIGUSR1 met a process that did not listen yet
    ],
)
def test_l26_a_walltimes_end_and_a_crash_are_told_apart_by_the_time_left(end, why):
    assert why_ended(end) == why


def test_l26_which_it_was_is_said_with_the_time_left():
    assert describe_ending(ending(137, 1812)) == (
        "crashed, which was not the walltime (exit code 137, 00:30:12 of the walltime left): step 5 of 10 is saved"
    )
    assert describe_ending(ending(0, 40, asked="walltime")) == (
        "ended before the walltime did (00:00:40 of the walltime left): step 5 of 10 is saved"
    )
    assert describe_ending(ending(137, 3)) == (
        "ended by the walltime (exit code 137, 00:00:03 of the walltime left): step 5 of 10 is saved"
    )


def a_try(first, last, why="crash"):
    return Try(began=0, ends_at=HOUR, first_step=first, ended=9, last_step=last, code=1, why=why)


def test_l25_two_tries_without_a_new_step_end_a_chain():
    assert reason_to_end([a_try(4, 4)], 4, 10, False) is None
    assert reason_to_end([a_try(4, 4), a_try(4, 6)], 6, 10, False) is None
    assert reason_to_end([a_try(0, 4), a_try(4, 4)], 4, 10, False) is None
    why, code = reason_to_end([a_try(4, 4), a_try(4, 4)], 4, 10, False)
    assert code == 1
    assert "2 tries saved no new step after step 4" in why


def test_a_run_that_is_done_or_stopped_or_wrong_has_no_further_try():
    assert reason_to_end([], 10, 10, False) == ("all 10 steps are done", 0)
    assert reason_to_end([], 4, 10, True) == ("the run's stop file is there", 0)
    assert reason_to_end([a_try(0, 4, "mistake")], 4, 10, False)[1] == 2


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def test_the_lead_is_measured_from_the_runs_own_steps_evaluations_and_saves(tmp_path):
    write(tmp_path / "metrics.jsonl", *({"step": n, "step_time_s": 10.0 + n} for n in range(5)), '{"step": 9, "st')
    save = {"event": "save", "seconds": 30.0}
    write(tmp_path / "events.jsonl", save, {"event": "evaluation", "seconds": 20.0}, {"event": "start"}, "\0\0\n")
    needed = 2 * 14.0 + 20.0 + 30.0
    assert lead_time(tmp_path, 24 * HOUR) == pytest.approx(60 + 1.5 * needed)
    assert lead_time(tmp_path, 200) == 100, "at most half of the walltime"


def test_a_run_that_has_done_nothing_yet_gets_a_guess(tmp_path):
    assert lead_time(tmp_path, HOUR) == 60 + 1.5 * 180
    assert lead_time(tmp_path, 24 * HOUR) == 60 + 1.5 * 300
    assert margin(100) == 5


def test_jobs_are_read_back_and_a_spoiled_line_is_passed_over(tmp_path):
    request = {"scheduler": "pbs", "nodes": 2, "walltime_s": 60}
    write_job_event(tmp_path, "submitted", "123.server", 100.0, **request, queue="debug", by="user")
    write_job_event(tmp_path, "submitted", "1234.server", 101.0, **request, queue="debug", by="user")
    with (tmp_path / "jobs.jsonl").open("a") as file:
        file.write('{"event": "began", "jo\n\0\0\n[]\n')
    write_job_event(tmp_path, "began", "123", 110.0, **request, left_s=50, step=3)
    write_job_event(tmp_path, "ended", "123", 130.0, step=7, code=0, why="walltime", left_s=30)
    first, second = read_jobs(tmp_path)
    assert (first.id, first.nodes, first.queue, second.id, second.tries) == (
        "123.server",
        2,
        "debug",
        "1234.server",
        [],
    )
    assert first.tries == [Try(110.0, 160.0, 3, 130.0, 7, 0, "walltime")]


@pytest.mark.parametrize("event", ["submitted", "began", "ended"])
@pytest.mark.parametrize("value", [None, [], {}, "x", float("nan"), float("inf"), "9" * 5000])
def test_values_of_another_kind_spoil_their_line_alone(event, value, tmp_path, monkeypatch):
    """Each value of each event in turn; what is left can be shown and reckoned with."""
    monkeypatch.setenv("PATH", str(tmp_path))  # so that no scheduler is asked
    request = {"scheduler": "pbs", "nodes": 2, "walltime_s": 60}
    whole = {
        "submitted": request | {"queue": "debug", "by": "user"},
        "began": request | {"left_s": 50, "step": 3},
        "ended": {"step": 7, "code": 0, "why": "walltime", "left_s": 30},
    }
    for name in ("time", "job", "event", *whole[event]):
        (tmp_path / "jobs.jsonl").write_text("5\n" + "[" * 10_000 + "\n")
        for each, facts in whole.items():
            line = {"time": "2026-12-01T00:00:00+00:00", "event": each, "job": "1"} | facts
            with (tmp_path / "jobs.jsonl").open("a") as file:
                file.write(json.dumps(line | ({name: value} if each == event else {})) + "\n")
        tries_since_submission(read_jobs(tmp_path))
        for line in job_table([tmp_path]):
            assert line.isprintable()


def test_a_users_new_submission_counts_the_tries_anew(tmp_path):
    request = {"scheduler": "pbs", "nodes": 1, "walltime_s": 60}
    for job, at, by in (("1", 100.0, "user"), ("2", 200.0, "user"), ("3", 300.0, "job")):
        write_job_event(tmp_path, "submitted", job, at, **request, queue=None, by=by)
        write_job_event(tmp_path, "began", job, at + 10, **request, left_s=50, step=int(at))
    assert [each.first_step for each in tries_since_submission(read_jobs(tmp_path))] == [200, 300]


def test_only_a_complete_checkpoint_is_a_saved_step(tmp_path):
    assert saved_step(tmp_path) == 0
    for name, is_complete in (("step-5", True), ("step-10", True), ("step-20", False), (".step-30.partial", True)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if is_complete:
            (tmp_path / "checkpoints" / name / "complete.json").touch()
    os.symlink("step-10", tmp_path / "checkpoints" / "latest")
    assert saved_step(tmp_path) == 10
