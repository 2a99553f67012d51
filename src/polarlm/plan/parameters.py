"""How many parameters a model has, by arithmetic on its shape."""

from polarlm.config import ModelConfig


def count_parameters(model: ModelConfig) -> int:
    """Exact number of trained values; a tied head counts once.

    `model.vocab_size` must be set, and `model.max_positions` too where positions are learned.
    """
    assert model.vocab_size is not None
    embedding = model.vocab_size * model.hidden
    positions = 0
    if model.position_embedding == "learned":
        assert model.max_positions is not None
        positions = model.max_positions * model.hidden
    head = 0 if model.tied_embeddings else embedding
    return embedding + positions + model.layers * _block(model) + _norm(model, model.hidden) + head


def _block(model: ModelConfig) -> int:
    hidden, ffn = model.hidden, model.ffn
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = hidden * (query + 2 * key) + query * hidden
    attention += (query + 2 * key) * model.qkv_bias + hidden * model.bias
    attention += 2 * _norm(model, model.head_dim) * model.qk_norm
    inner = 2 if model.activation == "swiglu" else 1
    feed_forward = (inner + 1) * hidden * ffn + (inner * ffn + hidden) * model.bias
    return attention + feed_forward + 2 * _norm(model, hidden)


def _norm(model: ModelConfig, width: int) -> int:
    return width * (2 if model.norm == "layernorm" and model.bias else 1)
