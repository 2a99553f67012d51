"""The end of a run that hangs: every rank says where it stands."""

import faulthandler
import sys


class Watchdog:
    """Ends this process when the start, a step, an evaluation or a save takes too long, its stacks in the rank's log.

    The timer is the interpreter's own and needs no Python to run, so that it sees a rank that waits inside a collective
    too. The launcher gathers from the logs which ranks were where.
    """

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: the longest that one of them may take; 0 is forever.
        """
        self._seconds = seconds

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()

    def begin(self) -> None:
        """Start the time anew: something else begins."""
        if self._seconds:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=sys.__stderr__)
