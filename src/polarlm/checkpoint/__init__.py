"""A model and its optimizer, on any mesh, to and from files that know no layout and run no code.

A checkpoint is a folder `step-N`:

    weights/        safetensors shards: each parameter under its one-process name
    optimizer/      safetensors shards: each parameter's state, such as `<parameter>.exp_avg`
    state.json      how far the run has come, the optimizer's numbers, the version of this format
    complete.json   size and SHA-256 of every file above; written last, so without it there is no checkpoint

`staging` copies what is to be saved so that training can go on, `writer` streams it into shards, `headers` believes
those only where the files bear them out, and `tensors` fills tensors from them. `weights` and `optimizer` know what
goes in; `state` reads the JSON beside; `completeness` when to trust a folder; `folders` which ones there are and which
to keep. `store` saves and loads a run's, `load` hands out weights alone, and `shelf` looks at a run's from outside.
"""

from polarlm.checkpoint.load import check_weights, load_model, load_weights
from polarlm.checkpoint.shelf import Saved, export_weights, prune, saved_checkpoints
from polarlm.checkpoint.store import Checkpoints

__all__ = [
    "Checkpoints",
    "Saved",
    "check_weights",
    "export_weights",
    "load_model",
    "load_weights",
    "prune",
    "saved_checkpoints",
]
