"""Text to token ids and back."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from polarlm.config import Record, UserError, check_inside, leads_outside, parse_json, read_bytes, read_json
from polarlm.data.foreign import MOST_BYTES, blames, check_ids, read_engine
from polarlm.data.output import make_folder, remove_empty

END_OF_DOCUMENT = "<|endoftext|>"
# What other makers call the token that ends a document, where their tokenizer_config.json does not say.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_FILES = ("tokenizer.json", "tokenizer_config.json")
_GPT2_FILES = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}
_SENTENCEPIECE = "tokenizer.model"
_SILENT = 4  # a level above every message of that library, whose errors are told here
_FALLBACK_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that the vocabulary has no token for
_BYTES_FILE = b'{"polarlm": "bytes"}\n'  # what stands for the tokenizer without files in a folder

# One regular expression cuts text before pairs are merged: a word with the one sign or space before it, up to three
# digits, a run of signs, line ends with the indentation after them, other white space.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+ *|\s+"
_LONG = re.compile(r"\S{1000}|\s{1000}")  # hardly a word


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    vocab_size: int  # rows that an embedding needs: the largest id, added tokens counted, + 1
    eod_id: int | None  # the token that ends a document
    digest: str  # SHA-256 of what defines it
    fallback_bytes: frozenset[int]  # ids for bytes of which `decode` reads a whole run at once: one fault spoils it all

    def encode(self, text: str) -> list[int]:
        """The ids of a text; what spells a special token in it is ordinary text, and nothing is added."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens stand for none."""

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: how many UTF-8 bytes of text each id stands for; 0 for special tokens and unused ids.

        Over `encode(text)` they add up to the text's bytes, and to one more where a tokenizer puts a space before it.
        """

    def save(self, folder: Path) -> None:
        """Write it into a folder from which `load_tokenizer` loads the same."""


class _Special(Record):
    content: str


class _Settings(Record):
    eos_token: str | _Special | None = None


class ByteTokenizer:
    """Every byte of the text's UTF-8 is a token; one more ends a document. It needs no files."""

    vocab_size = 257
    eod_id = 256
    digest = hashlib.sha256(b"polarlm bytes").hexdigest()
    fallback_bytes: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`; bytes that are no UTF-8 become U+FFFD."""
        return bytes(one for one in ids if one < 256).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array([1] * 256 + [0], np.int32)

    def save(self, folder: Path) -> None:
        """See `Tokenizer`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILES[0]).write_bytes(_BYTES_FILE)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            UserError: the file is not a tokenizer, or the settings beside it are not JSON.
        """
        self._path = path
        self._files = {_FILES[0]: read_bytes(path, MOST_BYTES)}
        settings_path = path.with_name(_FILES[1])
        settings: dict[str, Any] = {}
        if path.name == _FILES[0] and os.path.lexists(settings_path):
            _check_inside(settings_path)
            self._files[_FILES[1]] = read_bytes(settings_path, MOST_BYTES)
            settings = read_json(
                settings_path, _Settings, what="the JSON of a tokenizer's settings", mend="mend or remove it"
            )
        self._engine = read_engine(self._files[_FILES[0]], path)
        self._engine.encode_special_tokens = True
        self._engine.no_padding()
        self._engine.no_truncation()
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = vocabulary.get(_end_name(settings, vocabulary))
        self.digest = hashlib.sha256(self._files[_FILES[0]]).hexdigest()
        decoder = self._engine.decoder.__getstate__() if self._engine.decoder else b""  # as JSON
        self._is_byte_level = b"ByteLevel" in decoder
        bytes_named = vocabulary.items() if b"ByteFallback" in decoder else ()
        self.fallback_bytes = frozenset(number for token, number in bytes_named if _FALLBACK_BYTE.fullmatch(token))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        with blames(self._path, "cannot encode this text"):
            return [encoded.ids for encoded in self._engine.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        with blames(self._path, "cannot decode these ids"):
            return self._engine.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        """See `Tokenizer`."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, number in self._engine.get_vocab(with_added_tokens=False).items():
            lengths[number] = self._bytes_of(token)
        for number, token in self._engine.get_added_tokens_decoder().items():
            lengths[number] = 0 if token.special else len(token.content.encode())
        return lengths

    def _bytes_of(self, token: str) -> int:
        if self._is_byte_level:
            return len(token)  # one character stands for each byte
        if _FALLBACK_BYTE.fullmatch(token):
            return 1
        return len(token.replace("▁", " ").encode())

    def description(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json."""
        return self._engine.to_str()

    def save(self, folder: Path) -> None:
        """See `Tokenizer`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)


class SentencePieceTokenizer:
    """A SentencePiece `.model`, run by its own library."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            UserError: the file is not such a model, or the library is not installed.
        """
        try:
            import sentencepiece
        except ImportError:
            raise UserError(f"{path}: running it takes sentencepiece; pip install 'polarlm[data]'") from None
        self._path, self._content = path, read_bytes(path, MOST_BYTES)
        sentencepiece.SetMinLogLevel(_SILENT)
        with blames(path, "is not a SentencePiece model"):
            self._engine = sentencepiece.SentencePieceProcessor(model_proto=self._content)
            if not self._engine.vocab_size():
                raise ValueError("it has no tokens")
            self._engine.id_to_piece(list(range(self._engine.vocab_size())))  # each is a text
        self.vocab_size = self._engine.vocab_size()
        self.eod_id = self._engine.eos_id() if self._engine.eos_id() >= 0 else None
        self.digest = hashlib.sha256(self._content).hexdigest()
        self.fallback_bytes = frozenset(filter(self._engine.is_byte, range(self.vocab_size)))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        with blames(self._path, "cannot encode this text"):
            return self._engine.encode(texts)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        with blames(self._path, "cannot decode these ids"):
            return self._engine.decode([int(one) for one in ids])

    def token_bytes(self) -> np.ndarray:
        """See `Tokenizer`."""
        return np.array([self._bytes_of(one) for one in range(self.vocab_size)], np.int32)

    def _bytes_of(self, token: int) -> int:
        if self._engine.is_control(token) or self._engine.is_unused(token):
            return 0
        if self._engine.is_byte(token):
            return 1
        return len(self._engine.id_to_piece(token).replace("▁", " ").encode())

    def save(self, folder: Path) -> None:
        """See `Tokenizer`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SENTENCEPIECE).write_bytes(self._content)


def _from_gpt2_files(vocabulary: Path, merges: Path) -> "HuggingFaceTokenizer":
    """GPT-2's own two files, under either of their names, as the tokenizer.json that they stand for."""
    with blames(vocabulary, f"and {merges.name} are not GPT-2's vocabulary and merges"):
        ids = parse_json(read_bytes(vocabulary, MOST_BYTES))
        check_ids(ids)
        _check_inside(merges)
        lines = read_bytes(merges, MOST_BYTES).decode().splitlines()
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        engine = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    if END_OF_DOCUMENT in ids:
        engine.add_special_tokens([END_OF_DOCUMENT])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _FILES[0]
        engine.save(str(path))
        return HuggingFaceTokenizer(path)


def _end_name(settings: dict[str, Any], vocabulary: dict[str, int]) -> str | None:
    named = settings.get("eos_token")
    named = named["content"] if isinstance(named, dict) else named
    return named or next((name for name in _END_NAMES if name in vocabulary), None)


def load_tokenizer(where: str | Path) -> Tokenizer:
    """The tokenizer `bytes`, or that of a folder or file: tokenizer.json, GPT-2's two files, a SentencePiece model.

    Raises:
        UserError: there is none.
    """
    if str(where) == "bytes":
        return ByteTokenizer()
    path = _find_tokenizer(Path(where))
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.name in _GPT2_FILES:
        return _from_gpt2_files(path, path.with_name(_GPT2_FILES[path.name]))
    if path.stat().st_size == len(_BYTES_FILE) and path.read_bytes() == _BYTES_FILE:
        return ByteTokenizer()
    return HuggingFaceTokenizer(path)


def load_run_tokenizer(run_folder: Path) -> Tokenizer:
    """The tokenizer that a run keeps in its folder.

    Raises:
        UserError: there is none, or it is elsewhere.
    """
    folder = run_folder / "tokenizer"
    check_inside(folder, run_folder)
    return load_tokenizer(folder)


def _find_tokenizer(path: Path) -> Path:
    """The file that decides: a tokenizer.json before GPT-2's two files before a SentencePiece model."""
    candidates = [path]
    if os.path.isdir(path):
        candidates = [path / name for name in (_FILES[0], *_GPT2_FILES)] + sorted(path.glob("*.model"))
    found = next((one for one in candidates if os.path.isfile(one)), None)  # whatever is said for a path
    if found is None:
        raise UserError(
            f"{path}: no tokenizer there; give `bytes`, a SentencePiece .model, or a folder with tokenizer.json "
            "(`polarlm tokenizer train` makes one) or GPT-2's vocab.json and merges.txt"
        )
    if found != path:
        _check_inside(found)
    return found


def _check_inside(path: Path) -> None:
    """Refuse a file of a tokenizer's folder that leads out of it; but Hugging Face's cache keeps all files elsewhere in
    the same repository, `snapshots/REVISION/tokenizer.json -> ../../blobs/DIGEST`."""
    snapshots = path.absolute().parent.parent
    if snapshots.name != "snapshots" or leads_outside(path, snapshots.parent / "blobs"):
        check_inside(path, path.parent)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path, show_progress: bool = False) -> Tokenizer:
    """Train a byte-level BPE on texts and write it to `folder/tokenizer.json`; texts are read once and not kept.

    Args:
        vocab_size: ids in all: the 256 bytes, the merges, and last the end-of-document token.

    Raises:
        UserError: `vocab_size` has no room for the bytes and the end-of-document token, or the folder cannot be made.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise UserError(f"vocab-size: {vocab_size} is too small; the bytes and {END_OF_DOCUMENT} alone are 257")
    if vocab_size >= 2**31:
        raise UserError(f"vocab-size: {vocab_size} is too large; ids are 32-bit numbers")
    try:
        made = make_folder(folder)
    except OSError as error:  # known before the long work, not after it
        raise UserError(f"{folder}: cannot hold a tokenizer ({error}); choose another folder") from None
    try:
        engine = _train_engine(texts, vocab_size, alphabet, show_progress)
        aside = folder / ".tokenizer.json.partial"
        engine.save(str(aside))
        aside.replace(folder / _FILES[0])
    finally:
        remove_empty(made)
    return load_tokenizer(folder)


def _train_engine(
    texts: Iterable[str], vocab_size: int, alphabet: list[str], show_progress: bool
) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=show_progress)
    engine.train_from_iterator(_cut(texts), trainer)
    engine.add_special_tokens([END_OF_DOCUMENT])
    return engine


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """The same texts, cut within what has no break for long, as a genome: merging in a word takes its square."""
    for text in texts:
        start = 0
        for long in _LONG.finditer(text):
            yield text[start : long.end()]
            start = long.end()
        yield text[start:]


class TextStream:
    """Ids one by one to text in whole characters; the pieces join to `decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # one that was told, which some decoders need to place a space, and those held since
        self._told = ""  # that one, as it reads at the start of a text

    def push(self, token: int) -> str:
        """Take an id; return the text that is now certain: often what is new, sometimes nothing yet."""
        self._ids.append(token)
        alone = self._tokenizer.decode([token])
        if not alone or token in self._tokenizer.fallback_bytes:
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):  # perhaps a character whose other bytes are still to come
            return ""
        new = text[len(self._told) :]
        self._ids, self._told = [token], alone
        return new

    def flush(self) -> str:
        """The rest: a character that was cut in its middle comes as U+FFFD."""
        text = self._tokenizer.decode(self._ids)
        new, self._told = text[len(self._told) :], text
        return new
