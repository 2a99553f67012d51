"""The script that draws the picture of docs/long-sequences.md."""

import runpy
from pathlib import Path

import pytest

from polarlm.config import load_run

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "draw_long_sequences.py"))


def test_what_a_block_keeps_is_what_its_formulas_need(script):
    flags = (
        "--model.family llama --model.layers 1 --model.hidden 256 --model.heads 4 --model.kv-heads 2 --model.ffn 704"
    )
    model = load_run(
        None, environment={}, flags=[*flags.split(), "--model.vocab-size", "64", "--train.steps", "1"]
    ).config.model
    length = 512
    attention, feed_forward = script["block_bytes"](model, length)
    hidden, keys = 2 * 256, 2 * 2 * 64  # bytes of a token in bf16
    # The norm's input and output, q and what attention gives; k and v. Numbers of norm and softmax are few.
    assert attention == pytest.approx(length * (4 * hidden + 2 * keys), rel=0.05)
    # The norm's input and output; gate, its activation, up, and their product.
    assert feed_forward == pytest.approx(length * (2 * hidden + 4 * 2 * 704), rel=0.05)


def test_the_page_shows_it_and_names_every_switch_in_it(script, tmp_path):
    page = (DOCS / "long-sequences.md").read_text(encoding="utf-8")
    assert "(pictures/long_sequences.png)" in page
    assert script["PICTURE"].read_bytes().startswith(b"\x89PNG")
    script["draw"]().savefig(tmp_path / "drawn.png")
    for switch in ("train.recompute: full", "train.offload_activations: host", "train.tile: 4096", "parallel.context"):
        assert switch in page
