"""The longest sequence that trains."""

from collections.abc import Callable


def longest(trains: Callable[[int], bool], start: int, most: int, multiple: int = 1) -> int | None:
    """The largest length that trains, within a sixteenth: doubled from `start` until one does not, then bisected.

    Args:
        trains: tries one length.
        most: where the search ends at the latest.
        multiple: what a length must be a multiple of.

    Returns:
        None where not even `start` trains.
    """
    if not trains(start):
        return None
    good, bad = start, None
    while bad is None and good < most:
        candidate = min(2 * good, most)
        good, bad = (candidate, None) if trains(candidate) else (good, candidate)
    while bad is not None and bad - good > max(multiple, good // 16):
        middle = good + max(multiple, (bad - good) // 2 // multiple * multiple)
        if middle >= bad:
            break
        good, bad = (middle, bad) if trains(middle) else (good, middle)
    return good
