"""The numbers to beat, against the programs of that name."""

import lzma
import random
import zlib

import pytest

from polarlm.data import compressed_bits_per_byte

TEXT = " ".join(random.Random(1).choices(["to", "be", "or", "not", "that", "is", "question"], k=4000)).encode()


# Bytes of `gzip -9 -c < TEXT | wc -c` (gzip 1.12) and `xz -9 -c < TEXT | wc -c` (XZ Utils 5.4.1).
BY_PROGRAM = {"gzip": 2615, "xz": 2496}


@pytest.mark.parametrize("program", BY_PROGRAM)
def test_the_whole_text_is_what_the_program_makes_of_it(program):
    assert len(TEXT) == 17235
    assert compressed_bits_per_byte(TEXT)[program] == pytest.approx(8 * BY_PROGRAM[program] / len(TEXT), rel=0.01)


def test_a_stream_compressed_piece_by_piece_is_as_long():
    """By the libraries' other interfaces: xz's container of LZMA2 with its preset 9, gzip's of deflate at level 9."""
    engines = {
        "xz": lzma.LZMACompressor(lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9}]),
        "gzip": zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS),
    }
    bits = compressed_bits_per_byte(TEXT)
    for name, engine in engines.items():
        pieces = [engine.compress(TEXT[start : start + 1000]) for start in range(0, len(TEXT), 1000)]
        assert bits[name] == 8 * len(b"".join([*pieces, engine.flush()])) / len(TEXT)


def test_windows_are_compressed_each_on_its_own():
    twice = b"a window of 32 bytes, as you see."[:32] * 2
    assert compressed_bits_per_byte(twice, window=32) == compressed_bits_per_byte(twice[:32])
    assert compressed_bits_per_byte(twice, window=64) == compressed_bits_per_byte(twice)
    assert compressed_bits_per_byte(twice)["gzip"] < compressed_bits_per_byte(twice[:32])["gzip"]


def test_a_last_short_window_counts_too():
    text = TEXT[:100]
    parts = [compressed_bits_per_byte(text[:64])["xz"] * 64, compressed_bits_per_byte(text[64:])["xz"] * 36]
    assert compressed_bits_per_byte(text, window=64)["xz"] == pytest.approx(sum(parts) / 100)
