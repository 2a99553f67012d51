"""Tokenizers in others' formats give the ids that their own libraries give."""

import io
import json

import numpy as np
import pytest
import sentencepiece
import transformers

from polarlm.config import UserError
from polarlm.data import TextStream, load_tokenizer, train_tokenizer

TEXTS = [f"def f{n}(x):\n    return 'größer' * {n * 977} ≥ 🙂\n" for n in range(60)]


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2s_two_files(tmp_path, names):
    train_tokenizer(TEXTS, 400, tmp_path / "trained")
    described = json.loads((tmp_path / "trained" / "tokenizer.json").read_text())
    model, folder = described["model"], tmp_path / "gpt2"
    folder.mkdir()
    vocabulary = model["vocab"] | {"<|endoftext|>": 399}
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    for name in (names[0], "vocab.json"):
        (folder / name).write_text(json.dumps(vocabulary))
    for name in (names[1], "merges.txt"):
        (folder / name).write_text(f"#version: 0.2\n{merges}\n")
    theirs = transformers.GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    if names[0] != "vocab.json":
        (folder / "vocab.json").unlink()
        (folder / "merges.txt").unlink()
    ours = load_tokenizer(folder)
    assert (ours.vocab_size, ours.eod_id) == (400, 399)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(TEXTS[0]) == ours.encode(TEXTS[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, vocab_size=340, byte_fallback=True, model_type="bpe",
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("spm") / "any.model"
    path.write_bytes(written.getvalue())
    return path


def test_a_sentencepiece_model(model, tmp_path):
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(model)), load_tokenizer(model)
    assert (ours.vocab_size, ours.eod_id) == (theirs.vocab_size(), theirs.eos_id())
    for text in ["plain words", " a b  c", "中文 🙂 </s>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == text
        assert ours.token_bytes()[ids].sum() == len(text.encode()) + 1  # it puts a space before the text
        stream = TextStream(ours)
        assert "".join([*(stream.push(one) for one in ids), stream.flush()]) == text
    ours.save(tmp_path)
    assert load_tokenizer(tmp_path).digest == ours.digest


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "a.model").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"a\.model: is not a SentencePiece model"):
        load_tokenizer(tmp_path / "a.model")
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(UserError, match=r"vocab\.json.*are not GPT-2's"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no tokenizer there"):
        load_tokenizer(tmp_path / "empty")
    assert np.array_equal(load_tokenizer("bytes").token_bytes(), [1] * 256 + [0])
