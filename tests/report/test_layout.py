"""The layout as a table and as a picture: every rank is in it, and hundreds stay readable."""

import re

import pytest

from polarlm.config import UserError, load_run
from polarlm.report import describe_layout, draw_layout

MODEL = (
    "--model.layers 8 --model.hidden 64 --model.heads 8 --model.vocab-size 64 --train.seq-len 32 --train.steps 1 "
    "--train.global-batch-size 512"
).split()


def _config(flags):
    return load_run(None, environment={}, flags=[*MODEL, *flags.split()]).config


def test_two_replicas_differ_in_their_samples_alone():
    assert describe_layout(_config("--parallel.ranks 2")).splitlines() == [
        "ranks 2 = data 2; samples a step 512 of 32 tokens, microbatches a rank 256 of 1",
        "rank  samples",
        "0     0-255",
        "1     256-511",
    ]


def test_each_axis_is_told():
    table = describe_layout(
        _config(
            "--parallel.ranks 16 --parallel.pipeline 2 --parallel.context 2 --parallel.tensor 2 --parallel.zero-stage 3"
        )
    ).splitlines()
    assert table[1].split() == ["rank", "layers", "samples", "tokens", "matrices", "shard"]
    assert re.split("  +", table[2]) == ["0", "embedding, 0-3", "0-255", "0-7, 24-31", "1 of 2", "1 of 4"]
    assert re.split("  +", table[17]) == ["15", "4-7, head", "256-511", "8-15, 16-23", "2 of 2", "4 of 4"]
    assert table[18] == "a shard is of all state and parameters"


def test_the_neighbours_of_a_hybrid_are_next_to_each_other():
    flags = "--parallel.ranks 8 --parallel.context 8 --parallel.context-method hybrid --parallel.context-ulysses 4"
    table = describe_layout(_config(flags)).splitlines()
    assert table[0].startswith("ranks 8 = ring 2 x ulysses 4; ")
    tokens = [line.split()[1] for line in table[2:]]
    assert tokens == ["0-3", "4-7", "24-27", "28-31", "8-11", "12-15", "16-19", "20-23"]


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ("--parallel.ranks 256 --parallel.tensor 8", ["0-15", "0-31, 16 each", "1/8 each"]),
        ("--parallel.ranks 64 --parallel.tensor 8 --parallel.context 4", ["0-7", "0-255", "0-3, 28-31", "1/8 each"]),
        ("--parallel.ranks 512 --parallel.tensor 8 --parallel.pipeline 4 --parallel.pipeline-schedule dualpipev",
         ["0-31", "embedding, 0; 7, head", "0-127, 32 each", "1/8 each"]),
    ],
)  # fmt: skip
def test_many_ranks_are_put_together_along_the_inner_axes(flags, first):
    config = _config(flags)
    lines = describe_layout(config).splitlines()[2:]
    assert len(lines) <= 24
    assert re.split("  +", lines[0]) == first
    spans = [[int(end) for end in line.split()[0].split("-")] for line in lines]
    ranks = [rank for span in spans for rank in range(span[0], span[-1] + 1)]
    assert ranks == list(range(config.parallel.ranks))


@pytest.mark.parametrize("flags", ["--parallel.ranks 2", "--parallel.ranks 512 --parallel.tensor 8"])
def test_a_picture_has_a_cell_and_a_number_a_rank(tmp_path, monkeypatch, flags):
    from matplotlib.axes import Axes

    config, cells, texts = _config(flags), [], []
    add_patch, text = Axes.add_patch, Axes.text
    monkeypatch.setattr(
        Axes, "add_patch", lambda self, patch: (cells.append(patch.get_xy()), add_patch(self, patch))[1]
    )
    monkeypatch.setattr(Axes, "text", lambda self, x, y, s, **k: (texts.append(s), text(self, x, y, s, **k))[1])
    draw_layout(config, tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
    assert len(set(cells)) == len(cells) == config.parallel.ranks
    assert texts == [str(rank) for rank in range(config.parallel.ranks)]


@pytest.mark.parametrize("name", ["mesh", "mesh.foo", ".hidden"])
def test_the_picture_is_a_png_whatever_its_name(tmp_path, name):
    draw_layout(_config("--parallel.ranks 2"), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        draw_layout(_config("--parallel.ranks 2"), tmp_path)
