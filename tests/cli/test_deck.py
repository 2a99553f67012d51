"""The workshop deck's command as it is typed, with its variables before it."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from deck import DECK
from polarlm.cli import main
from polarlm.launch import check_environment

OTHERS = ("MPSIZE", "PPSIZE", "SPSIZE", "DATA_FILE_LIST", "WANDB_MODE", "RANK")


def test_the_decks_command_is_the_run_it_asks_for(tmp_path, monkeypatch, capsys):
    """Its 1.5 billion parameters are too many to train in a test; every variable that was read is told."""
    monkeypatch.chdir(tmp_path)
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in DECK.items():
        monkeypatch.setenv(name, value)
    assert main("train --data.paths synthetic --show-config --parallel.ranks 2".split()) == 0
    shown = capsys.readouterr()
    run = yaml.safe_load(shown.out)
    model, train, parallel = run["model"], run["train"], run["parallel"]
    assert (model["layers"], model["hidden"], model["heads"], model["ffn"]) == (48, 1536, 24, 6144)
    assert (model["vocab_size"], model["max_positions"], model["tied_embeddings"]) == (50257, 1024, True)
    assert (train["seq_len"], train["micro_batch_size"], train["gradient_accumulation_steps"]) == (1024, 1, 1)
    assert (train["attention"], train["global_batch_size"], train["steps"]) == ("flash", 1, 20)
    assert (parallel["ranks"], parallel["tensor"], parallel["zero_stage"]) == (2, 2, 1)
    assert run["name"] == "GPT1_5B-48x1536-s1024-gb1-dp1-zero1-tp2"
    for name, value in DECK.items():
        assert f"note: {name}={value}: " in shown.err
    assert not list(tmp_path.iterdir())


def test_empty_variables_are_as_good_as_none(tmp_path, monkeypatch, capsys):
    """L18."""
    monkeypatch.chdir(tmp_path)
    shown = []
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "XDG_CONFIG_HOME")
    for is_there in (False, True):
        for name in {*DECK, *OTHERS, *launcher}:
            monkeypatch.setenv(name, "") if is_there else monkeypatch.delenv(name, raising=False)
        check_environment(os.environ)
        assert main("train --model GPT125M --train.steps 5 --show-config".split()) == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert "max_positions: 1024" in shown[0].out


@pytest.fixture
def deck(tmp_path, start_process):
    """Start the deck's command with a preset of the same kind, small enough to be trained."""
    presets = tmp_path / "config/polarlm/presets.yaml"
    presets.parent.mkdir(parents=True)
    presets.write_text("GPT_small: {family: gpt, layers: 2, hidden: 32, heads: 4, vocab_size: 257}\n")
    inherited = {name: value for name, value in os.environ.items() if name not in OTHERS}

    def start(**variables):
        given = DECK | {"MODEL_SIZE_KEY": "GPT_small", "XDG_CONFIG_HOME": str(tmp_path / "config")} | variables
        words = "train --data.paths synthetic --name deck --parallel.ranks 2 --train.steps 3"
        return start_process([sys.executable, "-m", "polarlm", *words.split()], cwd=tmp_path, env=inherited | given)

    return start


def test_the_decks_command_trains_and_two_at_once_do_not_meet(deck, tmp_path):
    """There all runs of a folder wrote one file of settings, and raced."""
    asked = [
        {"SEQ_LEN": "32", "SP_TYPE": "megatron"},
        {"SEQ_LEN": "16", "SP_TYPE": "ds", "ZERO_STAGE": "3", "GAS": "2"},
    ]
    runs = [deck(**variables) for variables in asked]
    folders = []
    for run in runs:
        output, errors = run.communicate(timeout=180)
        assert run.returncode == 0, errors
        folders.append(tmp_path / output.partition(":")[0])
    assert {folder.name for folder in folders} == {"deck", "deck-2"}
    layouts = []
    for folder, variables in zip(folders, asked, strict=True):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["train"]["seq_len"] == int(variables["SEQ_LEN"])
        layouts.append((config["parallel"]["tensor"], config["parallel"]["context"], config["parallel"]["zero_stage"]))
        _check_rates(folder, int(variables["SEQ_LEN"]), batch=int(variables.get("GAS", 1)))
    assert layouts == [(2, 1, 1), (1, 2, 3)]


def _check_rates(folder: Path, seq_len: int, batch: int) -> None:
    """TFLOPS by hand: the honest number with half of the scores, and the deck's formula under its own name."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    block = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 4 * seq_len * 32 / 2
    model = 3 * batch * seq_len * (2 * block + 2 * 32 * 257)
    megatron = 24 * 3 * batch * seq_len * 2 * 32**2 * (1 + seq_len / (6 * 32) + 257 / (16 * 2 * 32))
    for line in lines:
        spent = line["step_time_s"] * 2 * 1e12
        assert line["model_tflops_per_device"] * spent == pytest.approx(model)
        assert line["megatron_tflops_per_device"] * spent == pytest.approx(megatron)
