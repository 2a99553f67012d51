"""A tokenizer from a stranger: each token under the id that stands in its file, or one line."""

import hashlib
import io
import json
import os
import random
import shutil

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from hostile.mutations import JSON_VALUES, MUTANTS, REFUSED, changed_bytes, changed_json, outcome_of
from polarlm.config import UserError
from polarlm.data import load_tokenizer, train_tokenizer

TEXTS = [f"def f{n}(x):\n    return 'größer' * {n * 977} ≥ 🙂\n" for n in range(60)]
TEXT = "Hello größer 12345 'x' ≥ 🙂\n\n  <|endoftext|> [UNK] </s> ｶﾞ ﬁ " + "a" * 50


def _word_piece(folder):
    engine = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.normalizer, engine.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "</s>"], show_progress=False)
    engine.train_from_iterator(TEXTS, trainer)
    engine.save(str(folder / "tokenizer.json"))


def _unigram(folder):
    engine = tokenizers.Tokenizer(models.Unigram())
    steps = [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    engine.normalizer, engine.decoder = normalizers.Sequence(steps), decoders.Metaspace()
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>"}
    engine.train_from_iterator(TEXTS, trainers.UnigramTrainer(vocab_size=120, show_progress=False, **specials))
    engine.save(str(folder / "tokenizer.json"))


def _bpe(folder):
    train_tokenizer(TEXTS, 300, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}, "a": [1]}))


def _gpt2(folder):
    train_tokenizer(TEXTS, 300, folder / "trained")
    model = json.loads((folder / "trained/tokenizer.json").read_text())["model"]
    shutil.rmtree(folder / "trained")
    (folder / "vocab.json").write_text(json.dumps(model["vocab"] | {"<|endoftext|>": 299}, ensure_ascii=False))
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))


def _sentence_piece(**how):
    def make(folder):
        written = io.BytesIO()
        trainer = sentencepiece.SentencePieceTrainer
        trainer.train(sentence_iterator=iter(TEXTS), model_writer=written, minloglevel=2, **how)
        (folder / "any.model").write_bytes(written.getvalue())

    return make


KINDS = {
    "bytes": lambda folder: load_tokenizer("bytes").save(folder),
    "byte-level BPE": _bpe,
    "WordPiece": _word_piece,
    "unigram": _unigram,
    "GPT-2's files": _gpt2,
    "SentencePiece BPE": _sentence_piece(
        vocab_size=340, model_type="bpe", byte_fallback=True, normalization_rule_name="identity"
    ),
    "SentencePiece unigram": _sentence_piece(vocab_size=60, model_type="unigram", hard_vocab_limit=False),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder of each kind."""
    place = tmp_path_factory.mktemp("tokenizers")
    for kind, make in KINDS.items():
        (place / kind).mkdir()
        make(place / kind)
    return place


def _use(folder):
    """What a tokenizer is and does."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    lengths = tokenizer.token_bytes()
    assert all(0 <= one < tokenizer.vocab_size for one in ids)
    assert len(lengths) == tokenizer.vocab_size < 10_000
    assert min(lengths) >= 0
    assert tokenizer.eod_id is None or 0 <= tokenizer.eod_id < tokenizer.vocab_size
    assert tokenizer.decode(ids) is not None
    return tokenizer.digest, ids


def _vocabulary_said(folder):
    """{token: id} by the files alone."""
    if (folder / "vocab.json").exists():
        return json.loads((folder / "vocab.json").read_bytes())
    described = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = described["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in described.get("added_tokens") or []}


def _spoil(path, chance):
    content = path.read_bytes()
    if path.suffix == ".json" and chance.random() < 0.7:
        # Most of a tokenizer is its vocabulary; half of the changes are elsewhere.
        for _ in range(20):
            changed = changed_json(content, chance)
            if chance.random() < 0.1 or _vocabulary_text(changed) == _vocabulary_text(content):
                break
    else:
        changed = changed_bytes(content, chance)
    path.write_bytes(changed)


def _vocabulary_text(content):
    return content.partition(b'"vocab":')[2]


def test_mutated_tokenizers(originals, tmp_path, capfd):
    chance, refused = random.Random(3), 0
    expected = {kind: _use(originals / kind) for kind in KINDS}
    place = shutil.copytree(originals, tmp_path / "tokenizers")
    for number in range(MUTANTS):
        kind = list(KINDS)[number % len(KINDS)]
        folder = place / kind
        victim = chance.choice(sorted(folder.iterdir()))
        before = victim.read_bytes()
        _spoil(victim, chance)
        found = outcome_of(lambda folder=folder: _use(folder), folder)
        if found is REFUSED:
            refused += 1
        else:
            digest, ids = found
            is_same = victim.read_bytes() == before or victim.name in ("tokenizer_config.json", "merges.txt")
            assert is_same or digest != expected[kind][0]
            if kind in ("byte-level BPE", "WordPiece", "unigram", "GPT-2's files"):
                said = _vocabulary_said(folder)
                engine = load_tokenizer(folder)._engine
                assert engine.get_vocab(with_added_tokens=True) == said
                assert len(set(said.values())) == len(said)
            elif kind == "bytes":
                assert ids == expected[kind][1]
        victim.write_bytes(before)
    assert MUTANTS // 3 < refused < MUTANTS
    assert {kind: _use(place / kind) for kind in KINDS} == expected
    assert capfd.readouterr().err == ""


def _described(**changes):
    """Spoils a tokenizer.json, by other values at its top or, as `model={...}`, in its model."""

    def spoil(folder):
        path = folder / "tokenizer.json"
        described = json.loads(path.read_bytes())
        model = described["model"] | changes.get("model", {})
        path.write_text(json.dumps(described | changes | {"model": model}))

    return spoil


def _vocabulary(**ids):
    def spoil(folder):
        path = folder / "tokenizer.json"
        described = json.loads(path.read_bytes())
        described["model"]["vocab"] |= ids
        path.write_text(json.dumps(described))

    return spoil


def _written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


CATASTROPHE = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
ATTACKS = {  # (kind, how its maker can spoil it, what is said)
    "an id of four billion": ("byte-level BPE", _vocabulary(x=2**32 - 1), "the largest id is 4294967295"),
    "an id beyond 64 bits": ("byte-level BPE", _vocabulary(x=2**64), "beyond 64 bits"),
    "an id below 0": ("byte-level BPE", _vocabulary(x=-1), "an id is no whole number from 0"),
    "an id that is a text": ("byte-level BPE", _vocabulary(x="1"), "an id is no whole number from 0"),
    "an id of a fraction": ("byte-level BPE", _vocabulary(x=0.5), "an id is no whole number from 0"),
    "two tokens of one id": ("byte-level BPE", _vocabulary(x=0), "two tokens have the same id"),
    "no vocabulary": ("byte-level BPE", _described(model={"vocab": {}, "merges": []}, added_tokens=[]), "is empty"),
    "a vocabulary of texts": ("byte-level BPE", _described(model={"vocab": ["a", "b"]}), "is not a tokenizer.json"),
    "an added token of another id": (
        "byte-level BPE",
        _described(added_tokens=[{"id": 5, "content": "<|endoftext|>", "special": True}]),
        "two tokens have the same id",
    ),
    "merges of what is not there": ("byte-level BPE", _described(model={"merges": [["zz", "zz"]]}), "is not a token"),
    "a prefix that makes Rust panic": (
        "byte-level BPE",
        _described(model={"continuing_subword_prefix": "xx"}),
        "slice index starts at",
    ),
    "an expression of endless time": ("byte-level BPE", _described(pre_tokenizer=CATASTROPHE), "retry-limit-in-match"),
    "an expression that is none": (
        "byte-level BPE",
        _described(pre_tokenizer=CATASTROPHE | {"pattern": {"Regex": "(["}}),
        "is not a tokenizer.json",
    ),
    "nothing": ("byte-level BPE", _written("tokenizer.json", b""), "is not a tokenizer.json"),
    "no UTF-8": ("byte-level BPE", _written("tokenizer.json", b'{"\xff": 1}'), "can't decode"),
    "nesting": ("byte-level BPE", _written("tokenizer.json", b"[" * 10**6), "nested too deep"),
    "a key twice": ("byte-level BPE", _written("tokenizer.json", b'{"a": 1, "a": 2}'), "'a' is given twice"),
    "gigabytes": ("byte-level BPE", lambda folder: os.truncate(folder / "tokenizer.json", 2**31), "is larger than"),
    "almost bytes": ("bytes", _written("tokenizer.json", b'{"polarlm": "bytez"}\n'), "there is no 'model'"),
    "settings that are a list": ("byte-level BPE", _written("tokenizer_config.json", b"[[1, 2]]"), "settings"),
    "an end that is a list": ("byte-level BPE", _written("tokenizer_config.json", b'{"eos_token": []}'), "`eos_token"),
    "an end without content": ("byte-level BPE", _written("tokenizer_config.json", b'{"eos_token": {}}'), "`eos_token"),
    "settings of a pipe": (
        "byte-level BPE",
        lambda folder: ((folder / "tokenizer_config.json").unlink(), os.mkfifo(folder / "tokenizer_config.json")),
        "is no regular file",
    ),
    "GPT-2's ids in a list": ("GPT-2's files", _written("vocab.json", b"[]"), "are not GPT-2's vocabulary"),
    "GPT-2's id of four billion": ("GPT-2's files", _written("vocab.json", b'{"a": 4294967295}'), "the largest id"),
    "GPT-2's merges of nothing there": ("GPT-2's files", _written("merges.txt", b"zz zz\n"), "are not GPT-2's"),
    "GPT-2's merges of one part": ("GPT-2's files", _written("merges.txt", b"ab\n"), "are not GPT-2's"),
    "GPT-2's merges of no UTF-8": ("GPT-2's files", _written("merges.txt", b"\xff \xff\n"), "can't decode"),
    "GPT-2's merges gone": ("GPT-2's files", lambda folder: (folder / "merges.txt").unlink(), "are not GPT-2's"),
    "GPT-2's merges of a pipe": (
        "GPT-2's files",
        lambda folder: ((folder / "merges.txt").unlink(), os.mkfifo(folder / "merges.txt")),
        "is no regular file",
    ),
    "no SentencePiece model": ("SentencePiece BPE", _written("any.model", b""), "is not a SentencePiece model"),
    "a SentencePiece model of gigabytes": (
        "SentencePiece BPE",
        lambda folder: os.truncate(folder / "any.model", 2**31),
        "is larger than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_its_maker_can_do_to_a_tokenizer(name, originals, tmp_path, capfd):
    kind, spoil, said = ATTACKS[name]
    folder = shutil.copytree(originals / kind, tmp_path / "tokenizer")
    spoil(folder)
    with pytest.raises(UserError) as refusal:
        _use(folder)
    assert said in str(refusal.value)
    assert outcome_of(lambda: _use(folder), folder) is REFUSED
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("value", JSON_VALUES)
def test_settings_and_vocabularies_of_any_json(value, originals, tmp_path):
    folder = shutil.copytree(originals / "byte-level BPE", tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": {value}}}')
    outcome_of(lambda: _use(folder), folder)
    (folder / "tokenizer_config.json").write_text(value)
    assert outcome_of(lambda: _use(folder), folder) is REFUSED or value in ("{}", '{"a": 1}')
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text(value)
    assert outcome_of(lambda: _use(folder), folder) is REFUSED


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("byte-level BPE", "tokenizer.json"),
        ("byte-level BPE", "tokenizer_config.json"),
        ("GPT-2's files", "vocab.json"),
        ("GPT-2's files", "merges.txt"),
        ("SentencePiece BPE", "any.model"),
    ],
)
def test_a_link_out_of_a_tokenizers_folder_is_refused(kind, name, originals, tmp_path):
    folder = shutil.copytree(originals / kind, tmp_path / "tokenizer")
    shutil.move(folder / name, tmp_path / "secret")
    (folder / name).symlink_to("../secret")
    assert outcome_of(lambda: _use(folder), folder) is REFUSED
    with pytest.raises(UserError, match=r"leads to .*secret, outside of its folder"):
        _use(folder)


def test_hugging_faces_cache_is_a_tokenizers_folder(originals, tmp_path):
    """Its files are links into the same repository's blobs; a blob that leads on is refused."""
    snapshot, blobs = tmp_path / "models--x/snapshots/abc", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (originals / "byte-level BPE").iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    assert _use(snapshot) == _use(originals / "byte-level BPE")
    blob = blobs / os.readlink(snapshot / "tokenizer.json").rpartition("/")[2]
    shutil.move(blob, tmp_path / "secret")
    blob.symlink_to("../../secret")
    with pytest.raises(UserError, match="outside of its folder"):
        _use(snapshot)
