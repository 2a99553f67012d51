"""Every parameter of a model by name, and which of them tensor-parallel ranks share, by arithmetic on its shape."""

from dataclasses import dataclass

from polarlm.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """
    Attributes:
        size: values of the whole.
        shared: whether tensor-parallel ranks hold a part each; else each holds all of it.
        summed: whether each of them computes only a part of its gradient's sum.
    """

    size: int
    shared: bool
    summed: bool = False

    def held(self, tensor: int) -> float:
        """Values that each of `tensor` ranks holds."""
        return self.size / tensor if self.shared else self.size


def block_parameters(model: ModelConfig, tensor: int = 1) -> dict[str, Parameter]:
    """One block's; with fewer key heads than tensor ranks, each of these holds all of them."""
    hidden, ffn, depth = model.hidden, model.ffn, model.head_dim
    width, kv_width = model.heads * depth, model.kv_heads * depth
    shares_kv = model.kv_heads % tensor == 0
    parameters = _norm(model, "attention_norm", hidden)
    parameters |= _columns("attention.q", hidden, width, model.qkv_bias)
    for name in ("k", "v"):
        parameters |= _columns(f"attention.{name}", hidden, kv_width, model.qkv_bias, shares_kv)
    if model.qk_norm:
        parameters |= _norm(model, "attention.q_norm", depth) | _norm(model, "attention.k_norm", depth)
    parameters |= _rows("attention.output", width, hidden, model.bias)
    parameters |= _norm(model, "feed_forward_norm", hidden)
    for name in ("gate", "up") if model.activation == "swiglu" else ("up",):
        parameters |= _columns(f"feed_forward.{name}", hidden, ffn, model.bias)
    return parameters | _rows("feed_forward.down", ffn, hidden, model.bias)


def embedding_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Those before the first block."""
    assert model.vocab_size is not None
    parameters = {"embedding.tokens.weight": Parameter(model.vocab_size * model.hidden, True)}
    if model.position_embedding == "learned":
        assert model.max_positions is not None
        parameters["embedding.positions.weight"] = Parameter(model.max_positions * model.hidden, False, True)
    return parameters


def head_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Those after the last block; a tied head is there too."""
    assert model.vocab_size is not None
    return _norm(model, "norm", model.hidden) | {"head.weight": Parameter(model.vocab_size * model.hidden, True)}


def _columns(name: str, inputs: int, outputs: int, bias: bool, shared: bool = True) -> dict[str, Parameter]:
    """A matrix whose outputs are shared out, or one that every rank repeats for inputs and outputs of its own."""
    weight = {f"{name}.weight": Parameter(inputs * outputs, shared, not shared)}
    return weight | ({f"{name}.bias": Parameter(outputs, shared, not shared)} if bias else {})


def _rows(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, Parameter]:
    """A matrix whose inputs are shared out; its bias is added to the sum, of which every rank sees the gradient."""
    weight = {f"{name}.weight": Parameter(inputs * outputs, True)}
    return weight | ({f"{name}.bias": Parameter(outputs, False)} if bias else {})


def _norm(model: ModelConfig, name: str, width: int) -> dict[str, Parameter]:
    parts = ("weight", "bias") if model.norm == "layernorm" and model.bias else ("weight",)
    return {f"{name}.{part}": Parameter(width, False, True) for part in parts}
