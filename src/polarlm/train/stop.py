"""Signals that ask a run to save and end: SIGTERM from a scheduler or a launcher, SIGUSR1 before a walltime's end."""

import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Remembers that this rank was asked to stop; the loop looks at it between steps."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal_name is not None
