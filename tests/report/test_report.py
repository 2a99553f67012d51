"""A run's picture and summary, from whole, short, torn and wrong metrics."""

import json
import math
import random
import warnings

import matplotlib.image
import pytest

from polarlm import cli
from polarlm.config import UserError
from polarlm.report import draw_loss, read_metrics, summary
from polarlm.report.loss import smooth


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "demo").mkdir()
    return tmp_path / "demo"


def write(folder, steps, tail=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + tail)


def training(count):
    chance = random.Random(0)
    steps = [{"step": n, "tokens": 100 * n, "loss": 2 + 5 / n + chance.gauss(0, 0.1)} for n in range(1, count + 1)]
    for step in steps[9::10]:
        step |= {"val_loss": step["loss"] + 0.1, "val_bits_per_byte": step["loss"] / 2}
    return steps


def look(path):
    """Return which of the two colours a picture has, and its height."""
    picture = (matplotlib.image.imread(path)[..., :3] * 255).round()
    colours = {"blue": (0x2F, 0x6D, 0xB5), "orange": (0xD1, 0x60, 0x3D)}
    return {name for name, colour in colours.items() if (picture == colour).all(axis=-1).any()}, len(picture)


def test_a_last_line_that_is_half_written_is_left_out(folder):
    write(folder, training(3), tail='{"step": 4, "loss": 2.')
    assert [step["step"] for step in read_metrics(folder)] == [1, 2, 3]
    write(folder, training(3), tail='{"step": 4}')
    assert [step["step"] for step in read_metrics(folder)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1}'])
def test_a_wrong_line_in_the_middle_is_named(folder, line):
    write(folder, training(2), tail=f"{line}\n" + '{"step": 4}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:3: "):
        read_metrics(folder)


@pytest.mark.parametrize("text", [None, "", '{"step": 1'])
def test_a_run_without_a_step_is_one_line(folder, text):
    if text is not None:
        (folder / "metrics.jsonl").write_text(text)
    for read in (draw_loss, summary):
        with pytest.raises(UserError, match="demo"):
            read(folder)


def test_the_picture_shows_training_validation_and_bits(folder):
    write(folder, training(40))
    path = draw_loss(folder)
    assert path == folder / "report" / "loss.png"
    colours, height = look(path)
    assert colours == {"blue", "orange"}
    write(folder, [{key: step[key] for key in ("step", "loss")} for step in training(40)])
    colours, lower = look(draw_loss(folder))
    assert colours == {"blue"}
    assert lower < height  # without the panel of bits per byte


@pytest.mark.parametrize(
    "steps",
    [
        training(1),
        training(10),
        [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 3.0}],
        [{"step": 1, "loss": math.nan}],
        [{"step": 5}],
        [{"step": 0, "tokens": 0, "val_loss": 3.0, "val_bits_per_byte": 1.0}],
    ],
)
def test_short_and_strange_runs_are_drawn_and_summed_up_too(folder, steps):
    write(folder, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw_loss(folder).stat().st_size > 1000
        assert "steps" in summary(folder)


def test_smoothing_keeps_a_straight_line_and_a_mean_and_passes_over_nan():
    line = [10.0 - 0.5 * n for n in range(20)]
    assert smooth(line, 3)[:17] == pytest.approx(line[:17])
    assert smooth([1.0, 3.0, 1.0, 3.0, 1.0], 2)[2] == pytest.approx(9 / 5)
    assert smooth([1.0, 2.0, math.nan, 4.0, 5.0], 1)[1:] == pytest.approx([1.5, 3.0, 4.5, 4.5])
    assert smooth([2.0, 7.0], 0) == [2.0, 7.0]


def test_the_summary_tells_what_was_measured_and_nothing_else(folder):
    measured = {"tokens_per_sec": 900.0, "mfu": 0.25, "step_time_s": 45.0, "model_tflops_per_device": 0.05}
    steps = [step | measured | {"peak_memory_bytes": 2**30 * (1 + step["step"] % 2)} for step in training(20)]
    steps[0] |= {"tokens_per_sec": 1.0}
    steps[11] |= {"loss": 0.5}
    write(folder, steps)
    rows = dict(line.strip().split("  ", 1) for line in summary(folder).splitlines()[1:])
    rows = {name: value.strip() for name, value in rows.items()}
    assert summary(folder).splitlines()[0] == "demo"
    assert rows["steps"] == "20"
    assert rows["tokens"] == "2,000"
    assert rows["training loss"] == f"{steps[-1]['loss']:.4f} (best 0.5000 at step 12)"
    assert rows["validation bits per byte"].startswith(f"{steps[-1]['val_bits_per_byte']:.4f}")
    assert rows["tokens per second"] == "900"
    assert rows["MFU"] == "25.0 %"
    assert rows["time in steps"] == "15 min 00 s"
    assert rows["peak memory"] == "2.00 GiB"
    write(folder, [{"step": n, "loss": loss} for n, loss in ((1, math.nan), (2, 3.0), (3, math.nan))])
    assert summary(folder).splitlines()[-1].endswith("nan (best 3.0000 at step 2)")
    write(folder, [{"step": 1, "loss": 2.0}])
    assert summary(folder).splitlines() == ["demo", "  steps          1", "  training loss  2.0000"]


def test_the_command_takes_a_folder_a_name_or_the_latest_run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    folder = folder.rename(tmp_path / "runs" / "demo")
    write(folder, training(10))
    (tmp_path / "runs" / "latest").symlink_to("demo")
    for words in ([], ["demo"], ["runs/demo"], [str(folder)]):
        assert cli.main(["report", *words]) == 0
        assert capsys.readouterr().out.startswith("demo\n")
    assert (folder / "report" / "loss.png").exists()
    assert cli.main(["report", "none"]) == 2
