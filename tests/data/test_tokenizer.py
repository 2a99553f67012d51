"""Text to ids and back, for three kinds of tokenizer: byte-level, byte fallback, SentencePiece-style."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from polarlm.config import UserError
from polarlm.data import TextStream, load_tokenizer, train_tokenizer

TEXTS = [
    "plain words, and more words",
    "  two spaces before, one after ",
    "def f(x):\n\tif x:\n        return 1234567\n\n\n",
    "don't_stop\r\nnot.now\u2028here\u0085and\u00a0there",
    "naïve ½ 東京 🙂👩‍👩‍👧 कि ﷺ \ufffd \x00",
    "<|endoftext|> is text here, as are </s> and <s>",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return train_tokenizer((text for text in TEXTS * 3), 400, folder)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """SentencePiece as Hugging Face writes it: a space is ▁, one is put before the text, unknown bytes are <0xNN>."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "a", "b", "c", "▁a", "▁b", "▁c"):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c")]
    engine = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip],
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder = tmp_path_factory.mktemp("pieces")
    engine.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    """The same, by pre-tokenizer and decoder instead of a normalizer, and without bytes."""
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", "▁", "a", "b", "c", "▁a", "▁b", "▁c"])}
    engine = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b"), ("▁", "c")], unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    folder = tmp_path_factory.mktemp("metaspace")
    engine.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def every(trained, pieces, metaspace):
    return {"bytes": load_tokenizer("bytes"), "trained": trained, "pieces": pieces, "metaspace": metaspace}


@pytest.mark.parametrize("name", ["bytes", "trained", "pieces"])
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(every, name, text):
    tokenizer = every[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back_and_its_bytes_are_counted(every, text):
    for name in ("bytes", "trained"):
        ids = every[name].encode(text)
        assert every[name].decode(ids) == text
        assert every[name].token_bytes()[ids].sum() == len(text.encode())


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_pieces_add_up_with_the_space_put_before(pieces, text):
    assert pieces.token_bytes()[pieces.encode(text)].sum() == len(text.encode()) + 1


def test_special_tokens_have_no_bytes_and_spelling_one_gives_text(every):
    for tokenizer in (every["bytes"], every["trained"], every["pieces"]):
        assert tokenizer.token_bytes()[tokenizer.eod_id] == 0
        assert tokenizer.eod_id not in tokenizer.encode("<|endoftext|></s>")
        assert tokenizer.decode([tokenizer.eod_id]) == ""


def test_bytes_needs_no_files_and_travels_with_a_run(tmp_path):
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    tokenizer.save(tmp_path / "tokenizer")
    assert load_tokenizer(tmp_path / "tokenizer").digest == tokenizer.digest


def test_a_saved_tokenizer_is_the_same(trained, tmp_path):
    trained.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.digest, again.vocab_size, again.eod_id) == (trained.digest, trained.vocab_size, trained.eod_id)
    assert again.encode(TEXTS[2]) == trained.encode(TEXTS[2])


def test_training_learns_merges_up_to_the_size_asked_for(tmp_path):
    texts = [f"word{number} in a line\n" for number in range(300)]
    tokenizer = train_tokenizer(iter(texts), 300, tmp_path)
    assert tokenizer.vocab_size == 300
    assert tokenizer.eod_id == 299
    assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2


def test_indentation_is_one_token_however_deep(tmp_path):
    tokenizer = train_tokenizer(["\n        return\n        pass\n"] * 50, 300, tmp_path)
    first, *_ = tokenizer.encode("\n        return")
    assert tokenizer.decode([first]) == "\n        "


def test_training_needs_room_for_the_bytes(tmp_path):
    with pytest.raises(UserError, match=r"256 is too small.*257"):
        train_tokenizer(["text"], 256, tmp_path)


def test_a_folder_that_cannot_be_made_is_known_before_the_training(tmp_path):
    (tmp_path / "file").touch()

    def texts():
        pytest.fail("the text was read")
        yield ""

    with pytest.raises(UserError, match="file: cannot hold a tokenizer"):
        train_tokenizer(texts(), 300, tmp_path / "file")


def vocabulary_of(numbers: dict[str, int], added: list[str], folder, settings: dict | None = None):
    engine = Tokenizer(models.WordLevel(numbers, unk_token=next(iter(numbers))))
    engine.add_special_tokens([AddedToken(name) for name in added])
    engine.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def test_needed_rows_count_added_tokens(tmp_path):
    numbers = {f"w{number}": number for number in range(257)}
    tokenizer = vocabulary_of(numbers, ["<x>", "<y>", "</s>"], tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (260, 259)
    assert tokenizer.token_bytes().shape == (260,)


def test_needed_rows_reach_the_largest_id_past_holes(tmp_path):
    tokenizer = vocabulary_of({"a": 0, "bé": 9}, [], tmp_path)
    assert tokenizer.vocab_size == 10
    np.testing.assert_array_equal(tokenizer.token_bytes(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 3])


@pytest.mark.parametrize("eos", ["<y>", {"content": "<y>", "lstrip": False}])
def test_the_settings_say_what_ends_a_document(tmp_path, eos):
    tokenizer = vocabulary_of({"a": 0}, ["<x>", "<y>", "</s>"], tmp_path, {"eos_token": eos})
    assert tokenizer.eod_id == 2


def test_the_settings_travel_with_a_run(tmp_path):
    tokenizer = vocabulary_of({"a": 0}, ["<x>", "<y>", "</s>"], tmp_path, {"eos_token": "<y>"})
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").eod_id == 2


def test_a_tokenizer_may_end_no_document(tmp_path):
    assert vocabulary_of({"a": 0}, ["<x>"], tmp_path).eod_id is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer there; give `bytes`"),
        ({"tokenizer.json": "nope"}, "is not a tokenizer.json"),
        ({"tokenizer.json": "[]"}, "is not a tokenizer.json"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json: is not the JSON"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_its_path(trained, tmp_path, files, message):
    for name, content in files.items():
        trained.save(tmp_path) if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path.name}.*{message}"):
        load_tokenizer(tmp_path)


def stream_of(tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("name", ["bytes", "trained", "pieces"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_joins_to_the_text(every, name, text):
    pushed = stream_of(every[name], every[name].encode(text))
    assert "".join(pushed) == text
    assert "\ufffd" in text or "\ufffd" not in "".join(pushed)


@pytest.mark.parametrize("character", ["é", "東", "🙂"])
def test_a_character_comes_whole_and_its_cut_tail_as_one_mark(character):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(f"a{character}")
    assert stream_of(tokenizer, ids) == ["a", *[""] * (len(ids) - 2), character, ""]
    assert stream_of(tokenizer, ids[:-1]) == ["a", *[""] * (len(ids) - 2), "\ufffd"]


@pytest.mark.parametrize("name", ["pieces", "metaspace"])
def test_a_stream_keeps_the_spaces_between_pieces(every, name):
    tokenizer = every[name]
    assert stream_of(tokenizer, tokenizer.encode("a b c")) == ["a", " b", " c", ""]
    assert "".join(stream_of(tokenizer, tokenizer.encode(" a b c"))) == tokenizer.decode(tokenizer.encode(" a b c"))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_stream_of_any_ids_joins_to_their_text(every, data):
    tokenizer = every[data.draw(st.sampled_from(sorted(every)))]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    assert "".join(stream_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("unit", ["ACGTTGCA", "x", " "])
def test_megabytes_without_a_break_are_trained_on_and_encoded(tmp_path, unit):
    text = unit * (2_000_000 // len(unit))
    start = time.process_time()
    tokenizer = train_tokenizer([text, "and words beside it"], 300, tmp_path)
    assert time.process_time() - start < 20
    sample = text[:3000]
    assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert len(tokenizer.encode(sample)) < 500
