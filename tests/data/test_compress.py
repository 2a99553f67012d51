"""The numbers to beat, against the programs of that name."""

import random
import shutil
import subprocess

import pytest

from polarlm.data import compressed_bits_per_byte

TEXT = " ".join(random.Random(1).choices(["to", "be", "or", "not", "that", "is", "question"], k=4000)).encode()


@pytest.mark.parametrize("program", ["gzip", "xz"])
def test_the_whole_text_is_what_the_program_makes_of_it(program):
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    length = len(subprocess.run([program, "-9", "-c"], input=TEXT, stdout=subprocess.PIPE, check=True).stdout)
    assert compressed_bits_per_byte(TEXT)[program] == pytest.approx(8 * length / len(TEXT), rel=1e-3)


def test_windows_are_compressed_each_on_its_own():
    twice = b"a window of 32 bytes, as you see."[:32] * 2
    assert compressed_bits_per_byte(twice, window=32) == compressed_bits_per_byte(twice[:32])
    assert compressed_bits_per_byte(twice, window=64) == compressed_bits_per_byte(twice)
    assert compressed_bits_per_byte(twice)["gzip"] < compressed_bits_per_byte(twice[:32])["gzip"]


def test_a_last_short_window_counts_too():
    text = TEXT[:100]
    parts = [compressed_bits_per_byte(text[:64])["xz"] * 64, compressed_bits_per_byte(text[64:])["xz"] * 36]
    assert compressed_bits_per_byte(text, window=64)["xz"] == pytest.approx(sum(parts) / 100)
