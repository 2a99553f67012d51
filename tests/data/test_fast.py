"""Bulk encoding by the faster engine: the same ids, or not used."""

import json
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from polarlm.data import load_tokenizer, prepare, train_tokenizer
from polarlm.data.fast import fastest_encoder, plain_encoder

TEXTS = [f"def f{n}(x):\n    return x * {n * 977}  # größer ≥ {n}\n\n\tif x: pass\n" for n in range(40)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tokenizer(TEXTS, 400, tmp_path_factory.mktemp("tokenizer"))


def _gpt2_like(folder, **changes):
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=changes.pop("add_prefix_space", False))
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    )
    described = json.loads(engine.to_str())
    for key, change in changes.items():
        change(described[key])
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return load_tokenizer(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200) | st.text(alphabet=" \n\tab1.<|endoftext|>'sé", max_size=200))
def test_any_text_has_the_same_ids(trained, text):
    fast, is_fast, _ = fastest_encoder(trained, TEXTS)
    assert is_fast
    assert np.array_equal(fast([text])[0], trained.encode(text))


def test_gpt2s_own_cutting(tmp_path):
    tokenizer = _gpt2_like(tmp_path)
    fast, is_fast, line = fastest_encoder(tokenizer, TEXTS)
    assert is_fast
    assert "the same ids" in line
    for text in (*TEXTS, "  it's  \n\n we'll <|endoftext|>  ", "\u2028\x00\ufffd🙂"):
        assert np.array_equal(fast([text])[0], tokenizer.encode(text))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"add_prefix_space": True}, "adds a space"),
        ({"model": lambda model: model["merges"].reverse()}, "not in the order of its ids"),
        ({"model": lambda model: model.update(unk_token="a")}, "not a plain BPE"),
    ],
)
def test_what_it_cannot_run_stays_with_the_library(tmp_path, changes, reason):
    tokenizer = _gpt2_like(tmp_path, **changes)
    encode, is_fast, line = fastest_encoder(tokenizer, TEXTS)
    assert not is_fast
    assert reason in line
    assert np.array_equal(encode(TEXTS[:1])[0], tokenizer.encode(TEXTS[0]))


def test_an_expression_that_is_read_otherwise_is_found_out(tmp_path, monkeypatch):
    tokenizer = _gpt2_like(tmp_path)
    monkeypatch.setattr("polarlm.data.fast._GPT2_PIECES", r"\s+|\S")
    _, is_fast, line = fastest_encoder(tokenizer, TEXTS)
    assert not is_fast
    assert "tiktoken's ids differ on" in line


def test_both_engines_write_the_same_dataset(tmp_path, trained, monkeypatch):
    trained.save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    written = []
    for name in ("fast", "plain"):
        if name == "plain":
            monkeypatch.setattr(
                sys.modules["polarlm.data.prepare"],
                "fastest_encoder",
                lambda tokenizer, sample: (plain_encoder(tokenizer), False, ""),
            )
        prepare([str(tmp_path / "a.jsonl")], str(tmp_path / "tokenizer"), tmp_path / name)
        written.append((tmp_path / f"{name}.bin").read_bytes())
    assert written[0] == written[1]


def test_a_split_by_another_behaviour_is_left_to_the_library(tmp_path):
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" "), "merged_with_next"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    engine.save(str(tmp_path / "tokenizer.json"))
    _, is_fast, line = fastest_encoder(load_tokenizer(tmp_path), TEXTS)
    assert (is_fast, "not one regular expression" in line) == (False, True)
