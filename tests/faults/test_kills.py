"""Killed without warning at random moments, again and again, a run ends as if it had not been."""

import contextlib
import os
import random
import time
from dataclasses import dataclass

import pytest

from faults.small_run import SmallRun, assert_no_process_left, kill, ranks_of
from faults.table import Outcome

NUMBER = int(os.environ.get("POLARLM_KILLS", "6"))
KILLS = {2: NUMBER - NUMBER // 3, 4: NUMBER // 3}  # by ranks
MOMENTS = ("save", "step", "save", "start")  # by turns
ZERO_STAGE = {2: 1, 4: 3}
EVERY = 4
SEED = int(os.environ.get("POLARLM_SEED", "1"))


@dataclass(frozen=True)
class Life:
    """From one start to the kill."""

    end: str
    taken: int  # the last step in the metrics
    starts: int  # how often the run had begun to train by then
    began: bool  # whether this life did


@pytest.mark.parametrize("ranks", KILLS)
def test_a_walk_of_kills_changes_nothing(ranks, tmp_path, text, outcomes):
    chance, kills = random.Random(f"{SEED}:{ranks}"), KILLS[ranks]
    shape = {"steps": 16 * (kills + 1), "every": EVERY, "ranks": ranks, "zero_stage": ZERO_STAGE[ranks]}
    killed = SmallRun(tmp_path / "killed", text, **shape)
    lives = [_live_and_die(killed, MOMENTS[number % len(MOMENTS)], chance) for number in range(kills)]
    killed.go_on()
    print(f"seed {SEED}:", *lives, sep="\n")
    straight = SmallRun(tmp_path / "straight", text, **shape | {"every": 0})
    straight.go_on()
    killed.assert_ended_as(straight)
    starts = [start["step"] for start in killed.events("start")]
    lost = [life.taken - starts[life.starts] for life in lives if life.began]
    assert max(lost) <= 2 * EVERY  # those since a save, and those while it is written
    in_saves = sum("save" in life.end for life in lives)
    outcomes[name_of(ranks)] = Outcome(
        f"{kills} kills, {in_saves} of them in a save: went on from the newest complete checkpoint each time",
        f"{max(lost)} at most, {sum(lost)} in all",
    )


def name_of(ranks: int) -> str:
    """As the table has it."""
    return f"killed (SIGKILL) at random moments, in saves too, on {ranks} ranks, saved every {EVERY} steps"


def _live_and_die(run: SmallRun, moment: str, chance: random.Random) -> Life:
    complete, starts, begun = run.complete(), len(run.events("start")), time.time()
    launcher = run.start("--resume")
    try:
        _await(run, moment, begun, chance, launcher)
        is_saving = bool(_being_saved(run, begun))
        victim = chance.choice(["launcher", "first rank", "last rank", "all"])
        _kill(launcher, victim)
        launcher.wait(timeout=60)
    finally:
        launcher.kill()
    assert_no_process_left(run.home)
    assert launcher.returncode != 0, "it ended before it was killed"
    new = [start["step"] for start in run.events("start")[starts:]]
    # One that was whole, and lacked only its name, may get it at the start.
    assert not new or (len(new) == 1 and new[0] in complete and new[0] >= complete[0]), (new, complete)
    end = "save" if is_saving else "step" if new else "start"
    return Life(f"{victim} in a {end}", run.last_step(), starts + len(new), bool(new))


def _await(run: SmallRun, moment: str, begun: float, chance: random.Random, launcher) -> None:
    """Let the run come to the moment at which it is to be killed."""
    if moment == "start":
        time.sleep(chance.uniform(0, 6))
        return
    target, saves = max([*run.complete(), run.last_step()]) + chance.randrange(1, 9), chance.randrange(1, 3)
    deadline, seen = time.monotonic() + 180, set()
    while launcher.poll() is None and len(seen) < saves and not (moment == "step" and run.last_step() >= target):
        assert time.monotonic() < deadline
        time.sleep(0.002)
        seen |= _being_saved(run, begun) if moment == "save" else set()
    time.sleep(chance.uniform(0, 0.05))


def _being_saved(run: SmallRun, since: float) -> set[str]:
    """Checkpoints on their way; what an earlier life left does not count."""
    partial = (run.folder / "checkpoints").glob(".step-*.partial")
    with contextlib.suppress(FileNotFoundError):  # it has just got its name
        return {path.name for path in partial if path.stat().st_mtime >= since}
    return set()


def _kill(launcher, victim: str) -> None:
    ranks = ranks_of(launcher.pid)
    if victim == "launcher" or not ranks:
        launcher.kill()
    elif victim == "all":
        launcher.kill()
        for rank in ranks:
            kill(rank)
    else:
        kill(ranks[0] if victim == "first rank" else ranks[-1])
