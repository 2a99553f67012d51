"""Floating-point operations of a training step, by arithmetic on the shapes.

A matrix product of (m, k) with (k, n) is 2·m·k·n operations; only matrix products count. A backward pass is twice
its forward pass. B batch, S sequence, H hidden, A heads, K kv heads, D head dim, F ffn, V vocabulary, L layers.
"""

from polarlm.config import ModelConfig


def block_forward_flops(model: ModelConfig, tokens: int, seq_len: int, *, causal: bool) -> int:
    """One block's forward matrix products over `tokens` tokens in sequences of `seq_len`.

    Args:
        causal: count only the half of the attention scores that a causal mask leaves.
    """
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections = 2 * model.hidden * (query + 2 * key) + 2 * query * model.hidden
    scores = attention_score_flops(model, tokens, seq_len, causal=causal)
    return tokens * projections + scores + feed_forward_flops(model, tokens)


def feed_forward_flops(model: ModelConfig, tokens: int) -> int:
    """One block's feed-forward products: 4·H·F a token, or 6·H·F with a gate."""
    matrices = 3 if model.activation == "swiglu" else 2
    return tokens * 2 * matrices * model.hidden * model.ffn


def attention_score_flops(model: ModelConfig, tokens: int, seq_len: int, *, causal: bool) -> int:
    """One block's forward QKᵀ and PV: 4·S·A·D a token, half of it under a causal mask."""
    return tokens * 4 * seq_len * model.heads * model.head_dim // (2 if causal else 1)


def head_forward_flops(model: ModelConfig, tokens: int) -> int:
    """The output head's forward product: 2·H·V a token."""
    assert model.vocab_size is not None
    return tokens * 2 * model.hidden * model.vocab_size


def model_flops(model: ModelConfig, tokens: int, seq_len: int, *, causal: bool = True) -> int:
    """Forward and backward of `tokens` tokens, whatever is recomputed on the way: 3 times the forward products.

    Not causal and with F = 4H this is 72·B·S·L·H²·(1 + S/(6H) + V/(12·L·H)) (arXiv 2104.04473, equation 3, without
    its recomputation).
    """
    blocks = model.layers * block_forward_flops(model, tokens, seq_len, causal=causal)
    return 3 * (blocks + head_forward_flops(model, tokens))


def hardware_flops(
    model: ModelConfig,
    tokens: int,
    seq_len: int,
    *,
    recompute: str,
    recompute_every: int = 1,
    tile: int = 0,
    causal: bool = True,
) -> int:
    """`model_flops` and what recomputation repeats in every n-th block: its forward pass once more when it is full, the
    attention scores alone when it is selective (arXiv 2205.05198, section 5). A feed-forward that takes a sequence in
    tiles is repeated once more in every block."""
    flops = model_flops(model, tokens, seq_len, causal=causal)
    if 0 < tile < seq_len:
        flops += model.layers * feed_forward_flops(model, tokens)
    if recompute == "none":
        return flops
    repeated = block_forward_flops if recompute == "full" else attention_score_flops
    return flops + model.layers // recompute_every * repeated(model, tokens, seq_len, causal=causal)


def megatron_tflops_per_device(
    model: ModelConfig, batch: int, seq_len: int, *, seconds: float, devices: int, recompute: str
) -> float:
    """TFLOPS per device as the "LLMs on Polaris" scripts count them, for comparison with the deck's tables.

    24·c·B·S·L·H²·(1 + S/(6H) + V/(16·L·H)) / (t·devices·10¹²), c = 4 with activation recomputation, else 3
    (argonne-lcf/Megatron-DeepSpeed, 2023). Like the original it has no causal half, takes F = 4H for granted, and
    keeps V/16 for c = 3 too.
    """
    assert model.vocab_size is not None
    passes = 4 if recompute == "full" else 3
    hidden, layers = model.hidden, model.layers
    inner = 1 + seq_len / (6 * hidden) + model.vocab_size / (16 * layers * hidden)
    return 24 * passes * batch * seq_len * layers * hidden**2 * inner / (seconds * devices * 1e12)
