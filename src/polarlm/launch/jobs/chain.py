"""What a job of a run decides: why a try ended, and whether there is to be another. Pure functions, without files."""

from collections.abc import Sequence
from dataclasses import dataclass

from polarlm.launch.jobs.lead import margin
from polarlm.launch.jobs.record import Try
from polarlm.launch.jobs.schedulers import clock

__all__ = ["USER_ERROR", "Ending", "describe_ending", "reason_to_end", "why_ended"]

USER_ERROR = 2
FRUITLESS_TRIES = 2  # so many in a row without a new step end a chain


@dataclass(frozen=True)
class Ending:
    """How a try ended.

    Attributes:
        code: the training's exit code; None where the job was killed before it could say.
        asked: why it was to stop: walltime, stop file, cancelled; requeued where the scheduler started the job anew;
            None where nobody had asked.
        left_s: what was left of the walltime.
    """

    code: int | None
    asked: str | None
    left_s: float
    walltime_s: float
    step: int
    steps: int


def why_ended(ending: Ending) -> str:
    """done, stop file, walltime, cancelled, requeued, mistake (a user's, code 2), or crash.

    A walltime's end and a crash look alike by their codes: ranks die of signals in both. The time that was left tells
    them apart.
    """
    is_late = ending.left_s <= margin(ending.walltime_s)
    asked = "walltime" if is_late and ending.asked == "cancelled" else ending.asked
    if ending.code == 0:
        return "done" if ending.step >= ending.steps else asked or "cancelled"
    if ending.code == USER_ERROR:
        return "mistake"
    died_of_signal = ending.code is None or ending.code > 128
    if died_of_signal and is_late:
        return "walltime"
    # A signal that meets a rank before it listens ends it; that is what was asked for. Where a scheduler ends a job
    # whose node has failed, the ranks that are left fail at saving.
    return asked if asked and (died_of_signal or asked == "cancelled") else "crash"


def describe_ending(ending: Ending) -> str:
    """One line, for the job's log."""
    left = f"{clock(ending.left_s)} of the walltime left"
    saved = f"step {ending.step} of {ending.steps} is saved"
    code = "killed" if ending.code is None else f"exit code {ending.code}"
    if ending.code == 0 and why_ended(ending) == "walltime":
        return f"ended before the walltime did ({left}): {saved}"
    return {
        "done": saved,
        "stop file": f"ended by the stop file: {saved}",
        "walltime": f"ended by the walltime ({code}, {left}): {saved}",
        "cancelled": f"ended by a signal from outside, not by the walltime ({code}, {left}): {saved}",
        "requeued": f"ended by the scheduler, which has started the job again ({code}, {left}): {saved}",
        "mistake": f"a mistake that another try would repeat (exit code 2, {left}): {saved}",
        "crash": f"crashed, which was not the walltime ({code}, {left}): {saved}",
    }[why_ended(ending)]


def reason_to_end(tries: Sequence[Try], step: int, steps: int, has_stop_file: bool) -> tuple[str, int] | None:
    """(why there is to be no further try, the job's exit code), or None."""
    if step >= steps:
        return f"all {steps} steps are done", 0
    if has_stop_file:
        return "the run's stop file is there", 0
    if tries and tries[-1].why == "mistake":
        return "the last try ended with a mistake that another would repeat; mend it, and submit again", USER_ERROR
    last = tries[-FRUITLESS_TRIES:]
    if len(last) == FRUITLESS_TRIES and all(each.is_without_step for each in last):
        return f"{FRUITLESS_TRIES} tries saved no new step after step {step}; the chain ends here", 1
    return None
