"""Presets, ours and the user's own."""

import json
import re

import pytest

from polarlm.cli import main
from polarlm.config import PRESETS, ModelConfig, UserError, dump_run, load_run, load_run_folder
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


# The deck's table: key, layers, hidden, heads.
DECK = """
GPT125M 12 768 16
GPT1_5B 48 1536 24
GPT2_7B 32 2560 32
GPT6_7B 32 4096 32
GPT13B 40 5120 64
GPT25B 64 6144 64
GPT30B 64 6144 64
GPT33B 80 6144 64
GPT145B 80 12288 96
GPT175B 96 12288 96
"""


def test_shapes_of_the_deck():
    rows = [line.split() for line in DECK.split("\n") if line]
    rows += [[f"GPT145B_{n}L", n, 12288, 96] for n in (2, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)]
    rows += [[f"GPT1T_{n}L", n, 25600, 160] for n in (1, 2, 4, 8, 16, 24, 30, 32, 60, 64, 120, 128, 256, 512, 1024)]
    assert {row[0] for row in rows} == {key for key in PRESETS if key.startswith("GPT")}
    for key, *numbers in rows:
        model = ModelConfig(preset=key)
        assert [model.layers, model.hidden, model.heads] == [int(number) for number in numbers]
        assert (model.kv_heads, model.ffn, model.vocab_size) == (model.heads, 4 * model.hidden, 50257)
        assert (model.position_embedding, model.norm, model.activation) == ("learned", "layernorm", "gelu")
        assert (model.bias, model.tied_embeddings) == (True, True)


@pytest.mark.parametrize(
    ("key", "numbers", "rope_base"),
    [
        ("2B", (12, 2048, 16, 4, 11008, 8192), 1e4),
        ("7B", (32, 4096, 32, 8, 11008, 4096), 1e4),
        ("70B", (80, 8192, 64, 8, 28672, 8192), 1e4),
        ("Llama2_7B", (32, 4096, 32, 32, 11008, 4096), 1e4),
        ("Llama2_13B", (40, 5120, 40, 40, 13824, 4096), 1e4),
        ("Llama2_70B", (80, 8192, 64, 8, 28672, 4096), 1e4),
        ("Llama3_8B", (32, 4096, 32, 8, 14336, 8192), 5e5),
        ("Llama3_3B", (28, 3072, 24, 8, 8192, 8192), 5e5),
    ],
)
def test_shapes_of_the_later_presets(key, numbers, rope_base):
    model = ModelConfig(preset=key)
    shape = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.max_positions)
    assert (shape, model.rope_base) == (numbers, rope_base)
    assert (model.position_embedding, model.norm, model.activation) == ("rotary", "rmsnorm", "swiglu")
    assert (model.bias, model.tied_embeddings) == (False, False)


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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("layers: many\n  hidden: 64\n  heads: 4", r"presets.yaml:2: model.layers: 'many'"),
        (
            "layers: 2\n  hidden: 64\n  heads: 4\n  haeds: 4",
            r"presets.yaml:5: model.haeds: unknown field; did you mean",
        ),
        ("layers: 2\n  hidden: 64\n  heads: 4\n  kv_heads: 3", r"presets.yaml:5: model.kv_heads: heads 4 is not a mul"),
    ],
)
def test_a_wrong_field_of_a_users_preset_is_named_with_its_line(own_presets, capsys, fields, words):
    own_presets.write_text(f"mine:\n  {fields}\n")
    with pytest.raises(UserError, match=words):
        load_run(None, environment={}, flags=["--model", "mine", "--train.steps", "1"])
    assert main(["models"]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_resolved_run_needs_its_users_presets_no_more(own_presets, tmp_path):
    own_presets.write_text("mine: {family: llama, layers: 2, hidden: 64, heads: 4, rope_scaling: {factor: 4}}\n")
    config = load_run(None, environment={}, flags=["--model", "mine", "--train.steps", "1"]).config
    assert config.model.rope_scaling.factor == 4
    (tmp_path / "config.yaml").write_text(dump_run(config))
    own_presets.unlink()
    assert load_run_folder(tmp_path) == config


def test_a_wrong_key_is_told_the_near_ones(own_presets):
    own_presets.write_text("GPT1_6B: {layers: 2, hidden: 64, heads: 4}\n")
    with pytest.raises(
        UserError, match=r"--model: model.preset: there is none called 'GPT1.6B'; near ones: GPT1_6B, G"
    ):
        load_run(None, environment={}, flags=["--model", "GPT1.6B", "--train.steps", "1"])


def test_models_as_json_and_a_preset_without_a_needed_field(own_presets, capsys):
    assert main(["models", "--json"]) == 0
    listed = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert listed["2B"]["parameters"] == 1_986_054_144
    own_presets.write_text("mine: {layers: 2}\n")
    assert main(["models"]) == 2
    assert "preset mine: model.hidden: is missing" in capsys.readouterr().err
