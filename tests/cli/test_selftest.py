"""`polarlm selftest`: what works in one line, and what does not by name."""

import json
import os
import re
from pathlib import Path

import pytest

from polarlm import cli
from polarlm.cli import selftest

FALLING = [5.6, 5.0, 4.5, 4.0, 3.6, 3.2, 2.9, 2.7]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which must be left empty."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def trained(monkeypatch, temporary):
    """Instead of training, have each run's metrics be these."""

    def have(straight, resumed, checkpoints=(4, 8)):
        def pretend(part, folder, words):
            if part == "training":
                run = folder / "runs" / "straight"
                for step in checkpoints:
                    (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
                environment = {"layout": {"ranks": 2}, "hosts": ["here"], "device": "cpu", "torch": "2.11"}
                (run / "environment.json").write_text(json.dumps(environment))
                write(run, straight)
            elif part == "resuming":
                run = Path(words[1])
                assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [
                    *range(1, 5)
                ]
                assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-4"]
                write(run, resumed)

        def write(run, losses):
            lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
            (run / "metrics.jsonl").write_text("".join(lines))

        monkeypatch.setattr(selftest, "_polarlm", pretend)

    return have


def test_l24_two_ranks_train_save_and_resume(temporary, capsys):
    assert cli.main(["selftest", "--parallel.ranks", "2"]) == 0, capsys.readouterr().out
    line = capsys.readouterr().out
    match = re.fullmatch(
        r"ok  2 ranks on \S+, .+, torch \S+; loss (\S+) -> (\S+) in 8 steps; saved at step 4 and resumed there, "
        r"losses equal to the bit; \d+ s\n",
        line,
    )
    assert match, line
    assert float(match[1]) > 5 > float(match[2])


def test_a_users_mistake_is_named_with_its_part(temporary, capsys):
    assert cli.main(["selftest", "--parallel.ranks", "2", "--parallel.tensor", "4"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAILED  training: --parallel.ranks: parallel.ranks: 2 is not")
    assert said.count("\n") == 1


def test_the_decks_model_does_not_take_the_place_of_the_tiny_one(monkeypatch):
    monkeypatch.setenv("MODEL_SIZE_KEY", "no such model")
    selftest._polarlm("training", Path(os.curdir), ["train", "--show-config", *selftest._SHAPE])


def test_equal_losses_are_what_works(trained, capsys):
    trained(FALLING, FALLING)
    assert cli.main(["selftest"]) == 0
    assert "losses equal to the bit" in capsys.readouterr().out
    trained(FALLING, [*FALLING[:-1], FALLING[-1] + 4e-6])
    assert cli.main(["selftest"]) == 0
    assert "losses equal within 4e-06" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("straight", "resumed", "said"),
    [
        (FALLING, [*FALLING[:6], 2.901, 2.7], "resuming: step 7 gave the loss 2.901000, and 2.900000"),
        (FALLING, FALLING[:4], "resuming: 8 steps should have given as many finite losses"),
        (FALLING, [*FALLING[:7], float("nan")], "resuming: 8 steps should have given"),
        ([5.6] * 8, [5.6] * 8, "training: the loss does not fall"),
        ([*FALLING[:7], float("nan")], FALLING, "training: 8 steps should have given"),
    ],
)
def test_what_fails_is_named_in_one_line(straight, resumed, said, trained, capsys):
    trained(straight, resumed)
    assert cli.main(["selftest"]) == 1
    line = capsys.readouterr().out
    assert line.startswith(f"FAILED  {said}")
    assert line.count("\n") == 1


def test_a_checkpoint_that_is_not_there_is_named(trained, capsys):
    trained(FALLING, FALLING, checkpoints=(8,))
    assert cli.main(["selftest"]) == 1
    assert capsys.readouterr().out == "FAILED  saving: there is no checkpoint of step 4\n"
