"""`polarlm tokenizer` and `polarlm data`, as they are typed."""

import json
import os
import subprocess
import sys

import pytest

from polarlm.cli import data, main
from polarlm.data import IndexedDataset, compressed_bits_per_byte, load_tokenizer

TEXTS = [f"Document number {number} has a few words.\n" for number in range(100)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a.jsonl, to be in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def polarlm(words: str) -> int:
    return main(words.split())


def test_from_text_to_tokens_and_a_look_at_them(here, capsys):
    assert polarlm("tokenizer train a.jsonl --vocab-size 300 --output tok") == 0
    assert capsys.readouterr().out == "tok: 300 ids\n"

    assert polarlm("data prepare a.jsonl --tokenizer tok --output out/text --workers 1") == 0
    manifest = json.loads((here / "out/text.json").read_text())
    summary = capsys.readouterr().out
    assert summary.startswith(f"out/text: 100 documents, {manifest['tokens']:,} tokens, ")
    assert f"{manifest['bytes'] / manifest['tokens']:.2f} bytes a token; " in summary

    assert polarlm("data inspect out/text --documents 2") == 0
    shown = capsys.readouterr().out
    assert "documents       100\n" in shown
    assert f"tokens          {manifest['tokens']:,} (uint16)\n" in shown
    assert all((text in shown) == (number < 2) for number, text in enumerate(TEXTS))


def test_a_bad_line_is_named_or_counted(here, capsys):
    (here / "bad.jsonl").write_bytes(b'{"text": "ab"}\n{"text": "\xe6b"}\n{"text": ""}\n{"text": "c"}\n')
    prepare = "data prepare bad.jsonl --tokenizer bytes --output text --workers 2"
    assert polarlm(prepare) == 2
    assert "error: bad.jsonl:2: byte 10 is not UTF-8 (0xe6)" in capsys.readouterr().err
    assert not list(here.glob("*text*"))

    assert polarlm(f"{prepare} --bad-lines skip") == 0
    assert "2 documents, 5 tokens, 0.60 bytes a token, skipped 2 (1 of them bad); " in capsys.readouterr().out


def test_text_and_names_are_utf_8_in_any_locale(here):
    """B12, where Python itself would follow a locale that knows no letter beyond ASCII."""
    (here / "résumé.jsonl").write_text('{"text": "où ça?"}\n', encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (here / "bad.jsonl").write_bytes(b'{"text": "ab"}\n{"text": "\xe6b"}\n')
    for words, code, expected in (
        (
            "data prepare bad.jsonl --tokenizer bytes --output text",
            2,
            "error: bad.jsonl:2: byte 10 is not UTF-8 (0xe6)",
        ),
        ("data prepare résumé.jsonl --tokenizer bytes --output donnée --workers 2", 0, "donnée: 1 documents, 9 tokens"),
        ("data inspect donnée", 0, "où ça?"),
        ("train --help", 0, "(log of the softmax's sum)²"),
    ):
        command = [sys.executable, "-m", "polarlm", *words.split()]
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=60)
        assert ended.returncode == code, ended.stderr.decode()
        assert expected in (ended.stderr if code else ended.stdout).decode()


def test_a_log_gets_plain_lines(here, capsys, monkeypatch):
    monkeypatch.setattr(data, "_SECONDS_BETWEEN_LINES", 0.0)
    assert polarlm("data prepare a.jsonl --tokenizer bytes --output text --workers 1") == 0
    assert capsys.readouterr().err.startswith("100% read, 100 documents, ")


def test_the_end_of_documents_can_be_left_out(here, capsys):
    assert polarlm("data prepare a.jsonl --tokenizer bytes --output text --workers 1 --no-append-eod") == 0
    assert 256 not in IndexedDataset("text").read(0, 10**6)


def test_every_byte_can_be_checked(here, capsys):
    polarlm("data prepare a.jsonl --tokenizer bytes --output text --workers 1")
    capsys.readouterr()
    assert polarlm("data check text") == 0
    assert capsys.readouterr().out == f"text: 100 documents, {IndexedDataset('text').tokens:,} tokens, " + (
        "every byte as it was prepared\n"
    )
    (here / "text.bin").write_bytes(bytes((here / "text.bin").stat().st_size))
    assert polarlm("data check text") == 2
    assert capsys.readouterr().err.startswith("error: text.bin: is not the file that text.json describes")


def test_compressors_get_the_documents_of_their_part(here, capsys):
    polarlm("data prepare a.jsonl --tokenizer bytes --output text --workers 1")
    capsys.readouterr()
    assert polarlm("data compress text --split 80,15,5 --window-bytes 64") == 0
    lines = capsys.readouterr().out.splitlines()
    text = "".join(TEXTS[80:95]).encode()
    assert lines[0] == f"validation text: 15 documents, {len(text)} bytes"
    for line, window in zip(lines[2:], (None, 64), strict=True):
        bits = compressed_bits_per_byte(text, window)
        assert line.split()[-2:] == [f"{bits['gzip']:.3f}", f"{bits['xz']:.3f}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data prepare nothing --tokenizer bytes --output out", "nothing: no such file or folder"),
        ("data prepare a.jsonl --tokenizer nowhere --output out", "nowhere: no tokenizer there"),
        ("data prepare a.jsonl --tokenizer bytes --output a.jsonl/out", "a.jsonl/out: cannot be written"),
        ("data prepare a.jsonl --tokenizer bytes --output out --workers 0", "argument --workers: 0 is less than 1"),
        ("data prepare a.jsonl --tokenizer bytes --output out --workers two", "argument --workers:"),
        (
            "data prepare a.jsonl --tokenizer bytes --output out --text-key body",
            "a.jsonl:1: no text under the key 'body'",
        ),
        ("data inspect nothing", "nothing.idx is not there; `polarlm data prepare` makes it"),
        ("data compress text --split 1,2", "--split 1,2: is three proportions"),
        ("data compress text --split 1,0,0", "--split 1,0,0: leaves no validation document of 100"),
        ("tokenizer train a.jsonl --vocab-size 10 --output tok", "10 is too small"),
        ("tokenizer train a.jsonl --vocab-size 300 --output a.jsonl", "a.jsonl: cannot hold a tokenizer"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(here, capsys, words, message):
    polarlm("data prepare a.jsonl --tokenizer bytes --output text --workers 1")
    capsys.readouterr()
    assert polarlm(words) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ")
    assert message in complaint
    assert complaint.count("\n") == 1


def test_a_dataset_without_a_manifest_wants_its_tokenizer_named(here, capsys):
    polarlm("data prepare a.jsonl --tokenizer bytes --output text --workers 1")
    (here / "text.json").unlink()
    assert polarlm("data inspect text") == 2
    assert "name its --tokenizer" in capsys.readouterr().err
    load_tokenizer("bytes").save(here / "tok")
    assert polarlm("data inspect text --tokenizer tok") == 0
    assert TEXTS[0] in capsys.readouterr().out
