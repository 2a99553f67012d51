"""From text to this rank's batches: documents, token ids on disk, samples by arithmetic, a loader that reads ahead.

`tokenizer` turns text into ids; `readers` finds documents, `prepare` encodes them on the processes of `workers`,
`indexed` keeps the ids on disk, `manifest` what they are known by; `samples` cuts them without an index, `documents`
takes them one by one, `grouped` those of like length together; `shapes` says how long a step's sequences are, `loader`
hands out batches, `prompt` what a model goes on from. No torch: arrays are numpy's.
"""

from polarlm.data.blend import BlendedSamples, read_paths
from polarlm.data.compress import compressed_bits_per_byte
from polarlm.data.documents import DocumentSamples
from polarlm.data.grouped import GroupedByLength
from polarlm.data.indexed import IndexedDataset, IndexedWriter, merge, pointers_of, smallest_dtype
from polarlm.data.loader import Batch, Loader, batch_of, check_tokenizer, open_split, tokenizer_of
from polarlm.data.manifest import compare_whole
from polarlm.data.prepare import prepare
from polarlm.data.prompt import encode_prompt
from polarlm.data.readers import read_texts
from polarlm.data.samples import Samples, SyntheticSamples, permute, split_documents
from polarlm.data.shapes import AnySamples, StepShape, StepShapes
from polarlm.data.tokenizer import TextStream, Tokenizer, load_run_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "AnySamples",
    "Batch",
    "BlendedSamples",
    "DocumentSamples",
    "GroupedByLength",
    "IndexedDataset",
    "IndexedWriter",
    "Loader",
    "Samples",
    "StepShape",
    "StepShapes",
    "SyntheticSamples",
    "TextStream",
    "Tokenizer",
    "batch_of",
    "check_tokenizer",
    "compare_whole",
    "compressed_bits_per_byte",
    "encode_prompt",
    "load_run_tokenizer",
    "load_tokenizer",
    "merge",
    "open_split",
    "permute",
    "pointers_of",
    "prepare",
    "read_paths",
    "read_texts",
    "smallest_dtype",
    "split_documents",
    "tokenizer_of",
    "train_tokenizer",
]
