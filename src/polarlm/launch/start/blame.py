"""Which of several failed ranks is the cause, and what to show of it."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

__all__ = ["choose_cause", "explain", "explain_hang", "hangs"]


class Ended(Protocol):
    """A rank that may have ended, here or on another machine."""

    rank: int
    host: str
    log: Path
    code: int | None
    ended_at: float

    def logged(self) -> list[str]:
        """Lines it wrote to its log since it started."""


R = TypeVar("R", bound=Ended)

USER_ERROR = 2
SHOWN_LINES = 60

# torch puts the rank before each line of a traceback once its process group stands.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")

# What a rank says that lost its peers: Gloo's, NCCL's and the store's words for it.
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|connection aborted|gloo|nccl"
    r"|Dist(Backend|Network|Store)Error|collective",
    re.IGNORECASE,
)


def choose_cause(processes: Sequence[R]) -> R:
    """Return the first rank that failed, passing over those that only lost the connection to a peer."""
    failed = sorted((process for process in processes if process.code), key=lambda process: process.ended_at)
    causes = (process for process in failed if not LOST_PEER.search(_last_exception(process.logged())))
    return next(causes, failed[0])


def explain(process: Ended) -> str:
    """Return what to show of a failed rank: a user's mistake as its one line, else the end of its log."""
    lines = [RANK_PREFIX.sub("", line) for line in process.logged()]
    if process.code == USER_ERROR:
        starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if starts:
            return "\n".join(lines[starts[-1] :])
    end = "\n".join(lines[-SHOWN_LINES:])
    return (
        f"{end}\nerror: rank {process.rank} on {process.host} {_fate(process.code)}; its log is {process.log}".lstrip()
    )


def _fate(code: int | None) -> str:
    if code is None or code <= 128:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"failed with exit code {code}"
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _last_exception(lines: Sequence[str]) -> str:
    """Return the line that names the exception of the last traceback, or the last line when there is none."""
    bare = [RANK_PREFIX.sub("", line) for line in lines]
    headers = [number for number, line in enumerate(bare) if line.startswith("Traceback (most recent call last)")]
    if not headers:
        return bare[-1] if bare else ""
    return next((line for line in bare[headers[-1] + 1 :] if line and not line[0].isspace()), "")


# How the interpreter begins what it writes of a process that took too long, each thread of it, and each frame of a
# thread's stack, innermost first.
HANG = re.compile(r"^Timeout \(([\d:.]+)\)!$")
THREAD = re.compile(r"^(Current thread|Thread) 0x")
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


def hangs(process: Ended) -> bool:
    """Whether a rank has ended because a step took too long."""
    return bool(process.code) and any(HANG.match(line) for line in process.logged())


def explain_hang(processes: Sequence[Ended]) -> str:
    """One line that says which ranks were where."""
    ranks: dict[str, list[int]] = {}
    for process in processes:
        ranks.setdefault(_whereabouts(process), []).append(process.rank)
    places = "; ".join(
        f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} {place}" for place, numbers in ranks.items()
    )
    return (
        f"error: no rank took a step within train.step_timeout: {places}; their stacks are in {processes[0].log.parent}"
    )


def _whereabouts(process: Ended) -> str:
    """Where the main thread of a rank stood: its innermost call, and the innermost one of ours."""
    lines = process.logged()
    starts = [number for number, line in enumerate(lines) if HANG.match(line)]
    if not starts:
        return "did not answer"
    # The main thread is written last.
    main = max((number for number, line in enumerate(lines) if THREAD.match(line)), default=0)
    frames = [match for line in lines[max(main, starts[-1]) :] if (match := FRAME.match(line))]
    if not frames:
        return "did not say where"
    inner, own = frames[0], next((frame for frame in frames if "polarlm" in frame["file"]), frames[0])
    return f"in {inner['function']}, from {own['function']} ({own['file'].rpartition('/')[2]}:{own['line']})"
