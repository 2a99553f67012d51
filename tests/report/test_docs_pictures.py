"""The script that draws the pictures of docs/parallelism.md."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "draw_parallelism.py"))


def test_every_picture_of_the_page_is_drawn_by_it(script, tmp_path):
    names = re.findall(r"\(pictures/(\w+)\.png\)", (DOCS / "parallelism.md").read_text(encoding="utf-8"))
    assert names == ["data", "tensor", "pipeline", "ring", "ulysses", "hybrid"]
    for name in names:
        script[name]().savefig(tmp_path / "drawn.png")
        assert (DOCS / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 6), (3, 2), (1, 3)])
def test_the_pipeline_of_the_picture_could_run(script, ranks, microbatches):
    passes = script["one_f_one_b"](ranks, microbatches)
    ends = {
        (rank, kind, number): start + length for rank, row in enumerate(passes) for kind, number, start, length in row
    }
    assert len(ends) == 2 * ranks * microbatches
    for rank, row in enumerate(passes):
        clock = 0
        for kind, number, start, length in row:
            before = (rank - 1, "F", number) if kind == "F" else (rank + 1, "B", number)
            own = (rank, "F", number) if kind == "B" else before
            assert start >= max(clock, ends.get(before, 0), ends.get(own, 0))
            clock = start + length
    assert max(ends.values()) == 3 * (microbatches + ranks - 1)
