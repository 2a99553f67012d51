"""Files to documents: which files, where one document ends, and what is refused."""

import json
import sysconfig
from pathlib import Path

import pytest

from polarlm.config import UserError
from polarlm.data import read_texts

# A line feed alone ends a record; a splitter that knows Unicode would cut at each of these.
SEPARATORS = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven"


def texts_of(*inputs, **options):
    return list(read_texts([str(one) for one in inputs], **options))


def test_a_line_feed_alone_ends_a_record(tmp_path):
    line = json.dumps({"text": SEPARATORS}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl").write_bytes(line + b"\r\n" + b'{"text": "carriage\\r return"}\n' + line)
    assert texts_of(tmp_path / "a.jsonl") == [SEPARATORS, "carriage\r return", SEPARATORS]


def test_a_folder_is_read_sorted_and_deep_and_known_kinds_alone(tmp_path):
    for name in ("b.txt", "a.md", "deep/er/c.py", "d.rst", "deep/e.jsonl", "image.png", "no_ending"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) if path.suffix == ".jsonl" else name)
    assert texts_of(tmp_path) == ["a.md", "b.txt", "d.rst", "deep/e.jsonl", "deep/er/c.py"]


def test_inputs_come_in_the_order_given(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path / "b.txt", tmp_path / "a.txt") == ["b.txt", "a.txt"]


def test_a_whole_file_is_one_document_as_it_stands(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\n")
    assert texts_of(tmp_path / "a.txt") == ["one\r\n\r\ntwo\n"]


def test_another_key_may_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "here", "text": "not here"}\n')
    assert texts_of(tmp_path / "a.jsonl", text_key="content") == ["here"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a\xe6b"}', r"byte 11 is not UTF-8 \(0xe6\)"),
        (b'{"text": "cut', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"body": "a"}', "no text under the key 'text'; name another with --text-key"),
        (b'{"text": 5}', "no text under the key 'text'"),
        (b'["text"]', "no text under the key 'text'"),
        (rb'{"text": "\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_line_stops_by_its_number_or_is_left_out(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "third"}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {message}.*--bad-lines skip$"):
        texts_of(path)
    assert texts_of(path, bad_lines="skip") == ["first", "third"]


def test_a_bad_file_stops_by_its_name_or_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_text("good")
    with pytest.raises(UserError, match=r"a\.txt: byte 3 is not UTF-8 \(0xe9\)"):
        texts_of(tmp_path)
    assert texts_of(tmp_path, bad_lines="skip") == ["good"]


def test_empty_texts_are_left_out_and_blank_ones_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": "a"}\n   \n{"text": "  "}\n')
    assert texts_of(tmp_path / "a.jsonl") == ["a", "  "]


def test_no_text_at_all_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r"a\.jsonl: no text in there"):
        texts_of(tmp_path / "a.jsonl")


def test_what_cannot_be_an_input_is_refused_by_its_name(tmp_path):
    (tmp_path / "image.png").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="nothing: no such file or folder"):
        texts_of(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"image\.png: files that end in \.txt"):
        texts_of(tmp_path / "image.png")
    with pytest.raises(UserError, match=r"empty: no file in this folder ends in \.txt"):
        texts_of(tmp_path / "empty")


def test_a_file_that_goes_away_is_named(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    texts = read_texts([str(tmp_path)])
    assert next(texts) == "a.txt"
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.txt: cannot be read"):
        next(texts)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library, in a place of one's own."""
    root = tmp_path / "python"
    for number in range(40):
        path = root / ("email" if number % 2 else "") / f"module{number:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {number}\n")
    for unwanted in ("site-packages/other.py", "__pycache__/a.py", "notes.txt"):
        (root / unwanted).parent.mkdir(exist_ok=True)
        (root / unwanted).write_text("not of the library")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    return root


def test_the_library_comes_in_a_mixed_order_that_its_place_does_not_change(library, tmp_path, monkeypatch):
    first = texts_of("stdlib")
    assert sorted(first) == sorted(f"# {number}\n" for number in range(40))
    in_email = [int(text[2:]) % 2 for text in first]
    assert 5 < sum(in_email[:20]) < 15  # of the 20 in that folder, which a sorted order has all in one half
    moved = library.rename(tmp_path / "moved")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(moved))
    assert texts_of("stdlib") == first


def test_the_library_of_this_python_is_there():
    module = Path(sysconfig.get_path("stdlib"), "bisect.py").read_text(encoding="utf-8")
    assert module in read_texts(["stdlib"])
