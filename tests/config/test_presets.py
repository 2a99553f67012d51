"""Presets, ours and the user's own."""

import pytest

from polarlm.cli import main
from polarlm.config import PRESETS, ModelConfig, UserError
from polarlm.plan import count_parameters


@pytest.fixture(autouse=True)
def own_presets(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "polarlm" / "presets.yaml"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize(
    ("key", "parameters"),
    [
        ("2B", 1_986_054_144),
        ("Llama2_7B", 6_738_415_616),
        ("Llama2_13B", 13_015_864_320),
        ("Llama2_70B", 68_976_648_192),
        ("Llama3_8B", 8_030_261_248),
    ],
)
def test_published_sizes(key, parameters):
    assert count_parameters(ModelConfig(preset=key)) == parameters


def test_every_key_of_the_deck_is_there():
    deck = "GPT125M GPT1_5B GPT2_7B GPT6_7B GPT13B GPT25B GPT30B GPT33B GPT145B GPT145B_2L GPT175B GPT1T_1L".split()
    assert set(deck) <= PRESETS.keys()
    assert len([key for key in PRESETS if key.startswith("GPT145B_")]) == 12
    assert len([key for key in PRESETS if key.startswith("GPT1T_")]) == 15


def test_gpt25b_is_29_billion():
    assert round(count_parameters(ModelConfig(preset="GPT25B", max_positions=2048)) / 1e9, 1) == 29.3


def test_a_users_own_preset(own_presets, capsys):
    own_presets.write_text("mine: {family: llama, layers: 2, hidden: 64, heads: 4, vocab_size: 100}\n")
    assert ModelConfig(preset="mine").hidden == 64
    assert main(["models"]) == 0
    assert "mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("GPT13B: {layers: 2}\n", "presets.yaml:1: GPT13B is a preset of PolarLM's"),
        ("mine: 5\n", "presets.yaml:1: mine is a mapping"),
        ("mine: [\n", "presets.yaml:2: not YAML"),
    ],
)
def test_a_users_mistake_is_named(own_presets, text, words):
    own_presets.write_text(text)
    with pytest.raises(UserError, match=words):
        ModelConfig(preset="mine")


def test_models_as_json_and_a_preset_without_a_needed_field(own_presets, capsys):
    import json

    assert main(["models", "--json"]) == 0
    listed = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert listed["2B"]["parameters"] == 1_986_054_144
    own_presets.write_text("mine: {layers: 2}\n")
    assert main(["models"]) == 2
    assert "preset mine: model.hidden: is missing" in capsys.readouterr().err
