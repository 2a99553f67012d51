"""Numbers that divide another."""

import math


def divisors(number: int) -> list[int]:
    """All of them in order, in √number trials; an impossible layout of any size is refused at once."""
    small = [trial for trial in range(1, math.isqrt(number) + 1) if number % trial == 0]
    return small + [number // trial for trial in reversed(small) if trial * trial != number]
