"""Rows as lines of a terminal and as Markdown."""

from collections.abc import Iterable

from polarlm.bench.trial import Row

_COLUMNS = {
    "samples/s": ("samples_per_sec", 1, "{:.3g}"),
    "tokens/s": ("tokens_per_sec", 1, "{:,.0f}"),
    "model TFLOPS": ("model_tflops_per_device", 1, "{:.3g}"),
    "hardware TFLOPS": ("hardware_tflops_per_device", 1, "{:.3g}"),
    "Megatron TFLOPS": ("megatron_tflops_per_device", 1, "{:.3g}"),
    "MFU": ("mfu", 100, "{:.1f}%"),
    "memory GiB": ("peak_memory_bytes", 1 / 2**30, "{:.2f}"),
}
_HEADS = ("layout", "ranks", "sequence", *_COLUMNS)


def length_name(tokens: int) -> str:
    """`2k` of 2048, `1M` of 1048576; other numbers as they are."""
    for letter, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens % size == 0 and tokens >= size:
            return f"{tokens // size}{letter}"
    return str(tokens)


def head(width: int) -> str:
    """The line above all others; `width` is of the longest layout's name."""
    return _join(_HEADS, width)


def line(row: Row, width: int) -> str:
    """A row for a terminal."""
    return _join(_words(row), width)


def as_markdown(rows: Iterable[Row]) -> str:
    """The rows as a table."""
    lines = [_HEADS, ["---"] * len(_HEADS), *(_words(row) for row in rows)]
    return "\n".join(f"| {' | '.join(words)} |" for words in lines)


def _words(row: Row) -> list[str]:
    place = [row.layout, str(row.ranks), length_name(row.seq_len)]
    if not row.is_ok:
        return [*place, row.outcome, *[""] * (len(_COLUMNS) - 1)]
    return [*place, *(form.format(row.numbers[name] * scale) for name, scale, form in _COLUMNS.values())]


def _join(words: Iterable[str], width: int) -> str:
    first, *others = words
    widths = [max(8, len(head)) for head in _HEADS[1:]]
    return "  ".join(
        [first.ljust(width), *(word.rjust(each) for word, each in zip(others, widths, strict=True))]
    ).rstrip()
