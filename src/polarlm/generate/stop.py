"""Texts that end a completion."""


class StopStrings:
    """Lets text through up to the first stop text, and holds back what may still become the beginning of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece of text and return what is certain; `stopped` then says whether a stop text came."""
        self._held += text
        found = [place for place in map(self._held.find, self.stop) if place >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(self._held) - self._possible_beginning()
        certain, self._held = self._held[:end], "" if found else self._held[end:]
        return certain

    def flush(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self) -> int:
        """Length of the longest end of the text that a stop text begins with."""
        longest = min(len(self._held), max(map(len, self.stop), default=1) - 1)
        ends = (length for length in range(longest, 0, -1) if self._begins_one(self._held[-length:]))
        return next(ends, 0)

    def _begins_one(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self.stop)
