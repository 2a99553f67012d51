"""The workshop deck's variables mean what the deck says, and none of the original scripts' faults returns."""

import pytest

from deck import DECK
from polarlm.config import UserError, default_name, load_run


def _load(environment, *flags, devices=1):
    return load_run(None, environment=environment, flags=["--data.paths", "synthetic", *flags], devices=devices)


def test_the_decks_own_command():
    loaded = _load(DECK)
    config = loaded.config
    assert (config.model.layers, config.model.hidden, config.model.heads) == (48, 1536, 24)
    assert (config.train.seq_len, config.train.micro_batch_size, config.train.global_batch_size) == (1024, 1, 1)
    assert (config.parallel.tensor, config.parallel.zero_stage, config.train.attention) == (1, 1, "flash")
    assert config.model.max_positions == 1024
    told = "\n".join(loaded.notes)
    assert all(f"{name}={value}" in told for name, value in DECK.items())
    assert "train.steps is 20" in told


def test_the_model_asked_for_is_trained_or_nothing_is():
    """There an unexported MODEL_SIZE_KEY trained the default model."""
    with pytest.raises(UserError, match="model"):
        _load({key: value for key, value in DECK.items() if key != "MODEL_SIZE_KEY"})
    with pytest.raises(UserError, match="GPT1_5B"):
        _load(DECK | {"MODEL_SIZE_KEY": "GPT1.5B"})


def test_plain_ulysses_is_sequence_parallel():
    """There SP_TYPE=ds without SPSIZE ran without sequence parallelism."""
    parallel = _load(DECK | {"SP_TYPE": "ds"}, devices=4).config.parallel
    assert (parallel.context, parallel.context_method, parallel.tensor) == (4, "ulysses", 1)


def test_the_preset_asked_for_last_is_the_model(tmp_path):
    """Fields of a run file do not outlive another preset, which would be trained under that preset's name."""
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  preset: GPT125M\n  layers: 2\n  dropout: 0.1\ntrain: {steps: 1}\n")
    loaded = load_run(file, environment={"MODEL_SIZE_KEY": "GPT1_5B"}, flags=["--model.heads", "16"])
    model = loaded.config.model
    assert (model.layers, model.hidden, model.heads, model.dropout) == (48, 1536, 16, 0)
    assert f"the preset GPT1_5B replaces model.layers, model.dropout ({file}:3)" in loaded.notes
    same = load_run(file, environment={"MODEL_SIZE_KEY": "GPT125M"}).config.model
    assert (same.layers, same.dropout) == (2, 0.1)


def test_a_name_says_the_shape_that_is_trained():
    assert default_name(_load(DECK).config) == "GPT1_5B-48x1536-s1024-gb1-dp1-zero1"
    assert default_name(_load(DECK, "--model.layers", "2").config) == "GPT1_5B-2x1536-s1024-gb1-dp1-zero1"


def test_degrees_given_are_kept():
    both = DECK | {"SP_TYPE": "ds", "SPSIZE": "2", "MPSIZE": "2"}
    parallel = _load(both, devices=8).config.parallel
    assert (parallel.context, parallel.tensor, parallel.data) == (2, 2, 2)
    parallel = _load(DECK | {"MPSIZE": "2"}, devices=8).config.parallel
    assert (parallel.tensor, parallel.data) == (2, 4)
    assert _load(DECK, devices=8).config.parallel.tensor == 8
    parallel = _load(DECK | {"SP_TYPE": "ds", "MPSIZE": "2"}, devices=8).config.parallel
    assert (parallel.context, parallel.tensor, parallel.data) == (4, 2, 1)


def test_each_value_is_told_under_the_variable_it_came_from():
    notes = _load(DECK | {"SP_TYPE": "ds", "SPSIZE": "2", "MPSIZE": "4", "WANDB_MODE": "online"}, devices=8).notes
    assert {
        "MPSIZE=4: parallel.tensor is 4",
        "SPSIZE=2: parallel.context is 2",
        "SP_TYPE=ds: parallel.context_method is ulysses",
        "WANDB_MODE=online: log.wandb_mode is online",
    } <= set(notes)


def test_a_degree_that_means_nothing_is_refused():
    with pytest.raises(UserError, match="SPSIZE: 2 is the degree of SP_TYPE=ds, and SP_TYPE is megatron"):
        _load(DECK | {"SPSIZE": "2"}, devices=2)
    with pytest.raises(UserError, match="SP_TYPE is not set"):
        _load({"MODEL_SIZE_KEY": "GPT125M", "SPSIZE": "2"}, devices=2)
    assert _load(DECK | {"SPSIZE": "1"}).config.parallel.context == 1


def test_a_file_list_has_an_end_and_so_asks_for_steps(tmp_path):
    (tmp_path / "list.txt").write_text("1 data/wiki wiki\n")
    given = DECK | {"DATA_FILE_LIST": str(tmp_path / "list.txt")}
    with pytest.raises(UserError, match=r"train\.steps: is missing: give train\.steps or train\.tokens"):
        load_run(None, environment=given)
    config = load_run(None, environment=given, flags=["--train.steps", "3"]).config
    assert config.data.file_list == given["DATA_FILE_LIST"]


@pytest.mark.parametrize(("text", "kernel"), [("1", "flash"), ("0", "math"), ("false", "math"), ("", "auto")])
def test_flash_attention_is_off_when_it_says_off(text, kernel):
    """There any text that was not empty, even 0, counted as on."""
    assert _load(DECK | {"USE_FLASH_ATTN": text}).config.train.attention == kernel


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("SP_TYPE", "deepspeed", "known: megatron, ds"),
        ("USE_FLASH_ATTN", "perhaps", "neither on"),
        ("MPSIZE", "two", "MPSIZE"),
        ("ZERO_STAGE", "4", "ZERO_STAGE: parallel.zero_stage"),
        ("WANDB_MODE", "sometimes", "WANDB_MODE: log.wandb_mode"),
        ("SEQ_LEN", "long", "SEQ_LEN: train.seq_len"),
    ],
)
def test_what_is_unknown_stops_the_run(name, text, words):
    """There an unknown SP_TYPE only printed a message."""
    with pytest.raises(UserError, match=words):
        _load(DECK | {name: text})


def test_a_longer_sequence_raises_the_positions_and_says_so():
    """There max_position followed SEQ_LEN in silence."""
    loaded = _load({"MODEL_SIZE_KEY": "2B", "SEQ_LEN": "16384"})
    assert loaded.config.model.max_positions == 16384
    assert "model.max_positions raised from 8192 to train.seq_len 16384" in loaded.notes
