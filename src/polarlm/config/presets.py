"""Named model shapes: what a preset fills in before the user's own fields override it.

Sources: argonne-lcf/Megatron-DeepSpeed, its model table of 2023 (GPT; feed-forward four times the hidden size, learned
positions, GPT-2's vocabulary, tied) and its later Llama-like shapes; Llama 2 (arXiv 2307.09288) and 3 (2407.21783).
"""

import difflib
import os
from pathlib import Path
from typing import Any

from polarlm.config.errors import UserError
from polarlm.config.sources import Leaves, as_tree, from_yaml

Preset = dict[str, Any]


def _gpt(layers: int, hidden: int, heads: int) -> Preset:
    return {"family": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "vocab_size": 50257}


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab_size: int, max_positions: int, **more: Any
) -> Preset:
    return {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab_size": vocab_size,
        "max_positions": max_positions,
        **more,
    }


PRESETS: dict[str, Preset] = {
    "GPT125M": _gpt(12, 768, 16),
    "GPT1_5B": _gpt(48, 1536, 24),
    "GPT2_7B": _gpt(32, 2560, 32),
    "GPT6_7B": _gpt(32, 4096, 32),
    "GPT13B": _gpt(40, 5120, 64),
    "GPT25B": _gpt(64, 6144, 64),  # 29.3 billion parameters in truth; the name is the workshop deck's
    "GPT30B": _gpt(64, 6144, 64),
    "GPT33B": _gpt(80, 6144, 64),
    "GPT145B": _gpt(80, 12288, 96),
    **{f"GPT145B_{n}L": _gpt(n, 12288, 96) for n in (2, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)},
    "GPT175B": _gpt(96, 12288, 96),
    **{f"GPT1T_{n}L": _gpt(n, 25600, 160) for n in (1, 2, 4, 8, 16, 24, 30, 32, 60, 64, 120, 128, 256, 512, 1024)},
    "2B": _llama(12, 2048, 16, 4, 11008, 256000, 8192),
    "7B": _llama(32, 4096, 32, 8, 11008, 32000, 4096),
    "70B": _llama(80, 8192, 64, 8, 28672, 32000, 8192),
    "Llama2_7B": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "Llama2_13B": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "Llama2_70B": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "Llama3_8B": _llama(32, 4096, 32, 8, 14336, 128256, 8192, rope_base=500000.0),
    "Llama3_3B": _llama(28, 3072, 24, 8, 8192, 128256, 8192, rope_base=500000.0),
}

# What a family means; every one of these is a field of its own that a run may override.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {
        "position_embedding": "learned",
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu",
        "bias": True,
        "tied_embeddings": True,
    },
    "llama": {
        "position_embedding": "rotary",
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "activation": "swiglu",
        "bias": False,
        "tied_embeddings": False,
    },
}


def known_presets() -> dict[str, Preset]:
    """Our presets and the user's own.

    Raises:
        UserError: the user's file is no mapping of names, other than ours, to fields.
    """
    return PRESETS | {name: as_tree(leaves) for name, leaves in _own_presets().items()}


def preset_named(name: str) -> Preset:
    """The fields of a preset.

    Raises:
        ValueError: there is none of this name; says which come near.
        UserError: as `known_presets`.
    """
    presets = known_presets()
    if name in presets:
        return presets[name]
    near = difflib.get_close_matches(name, presets, n=3, cutoff=0.4)
    mend = f"near ones: {', '.join(near)}" if near else "`polarlm models` lists them"
    raise ValueError(f"preset: there is none called {name!r}; {mend}")


def preset_leaves(name: Any) -> Leaves:
    """The fields of a user's own preset by their paths in a run, each with its file and line; none for one of ours."""
    return {f"model.{field}": leaf for field, leaf in _own_presets().get(str(name), {}).items()}


def _own_presets() -> dict[str, Leaves]:
    path = user_presets_path()
    own: dict[str, Leaves] = {}
    for key, leaf in (from_yaml(path) if path.is_file() else {}).items():
        if leaf.value is None:
            continue
        name, _, field = key.partition(".")
        if not field:
            raise UserError(
                f"{leaf.origin}: {name} is a mapping of model fields, such as `{name}: {{layers: 12, ...}}`"
            )
        if name in PRESETS:
            raise UserError(f"{leaf.origin}: {name} is a preset of PolarLM's; choose another name")
        if field == "preset":
            raise UserError(f"{leaf.origin}: {name}: a preset says its fields itself and builds on no other")
        own.setdefault(name, {})[field] = leaf
    return own


def user_presets_path() -> Path:
    """`~/.config/polarlm/presets.yaml`, where a user's own presets are looked for."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "polarlm" / "presets.yaml"


def default_ffn(activation: str, hidden: int) -> int:
    """Feed-forward width: 4·hidden for GELU; for SwiGLU the same parameters in three matrices, rounded up to 64."""
    if activation == "gelu":
        return 4 * hidden
    return -(-(8 * hidden // 3) // 64) * 64
