"""What general compressors make of a text: the numbers that a language model of it must beat."""

import gzip
import lzma
from collections.abc import Callable

_COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda text: gzip.compress(text, 9),
    "xz": lambda text: lzma.compress(text, preset=9),
}


def compressed_bits_per_byte(text: bytes, window: int | None = None) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9` on a text.

    Args:
        window: cut the text into pieces of this many bytes, each compressed on its own, as a model that sees no more
            than that much context would have to; None compresses it whole.
    """
    step = window or max(1, len(text))
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    return {
        name: 8 * sum(len(compress(piece)) for piece in pieces) / max(1, len(text))
        for name, compress in _COMPRESSORS.items()
    }
