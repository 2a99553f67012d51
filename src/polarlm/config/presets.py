"""Named model shapes: what a preset fills in before the user's own fields override it.

Sources: the model table of argonne-lcf/Megatron-DeepSpeed (2023) for the GPT presets, whose
feed-forward is four times the hidden size and whose vocabulary is GPT-2's.
"""

from typing import Any

_GPT2_VOCABULARY = 50257

_GPT_SHAPES = {  # layers, hidden, heads
    "GPT125M": (12, 768, 16),
    "GPT1_5B": (48, 1536, 24),
    "GPT2_7B": (32, 2560, 32),
    "GPT6_7B": (32, 4096, 32),
    "GPT13B": (40, 5120, 64),
    "GPT25B": (64, 6144, 64),
    "GPT30B": (64, 6144, 64),
    "GPT33B": (80, 6144, 64),
    "GPT145B": (80, 12288, 96),
    "GPT175B": (96, 12288, 96),
}

PRESETS: dict[str, dict[str, Any]] = {
    key: {"family": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "vocab_size": _GPT2_VOCABULARY}
    for key, (layers, hidden, heads) in _GPT_SHAPES.items()
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


def default_ffn(activation: str, hidden: int) -> int:
    """Feed-forward width: 4·hidden for GELU; for SwiGLU the same parameters in three matrices, rounded up to 64."""
    if activation == "gelu":
        return 4 * hidden
    return -(-(8 * hidden // 3) // 64) * 64
