"""The shape of a model, as typed values."""

from typing import Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from polarlm.config.divisors import divisors
from polarlm.config.presets import FAMILIES, default_ffn, preset_named
from polarlm.config.section import LARGEST_SIZE, Many, Section, Size


class RopeScaling(Section):
    """Llama-3's stretching of the rotary frequencies (Llama 3 report, arXiv 2407.21783; `transformers`' `llama3`)."""

    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_positions: Size = 8192


class ModelConfig(Section):
    """One transformer. What the user leaves out comes from the preset, then from the family, then from the shape."""

    preset: str | None = Field(None, description="a named shape; the other fields override it; `--model KEY` for short")
    family: Literal["gpt", "llama"] = Field("gpt", description="sets the switches below that are not given")
    layers: Many = Field(description="number of transformer blocks")
    hidden: Size = Field(description="width H of the residual stream")
    heads: Many = Field(description="query heads A")
    kv_heads: Size = Field(description="key and value heads K; by default as many as heads")
    head_dim: Size = Field(description="width D of a head; by default hidden / heads")
    ffn: Size = Field(description="feed-forward width F")
    vocab_size: Size | None = Field(None, description="rows V of the embedding; by default the tokenizer's")
    max_positions: Size | None = Field(None, description="longest sequence; by default train.seq_len")
    position_embedding: Literal["learned", "rotary"] = Field(description="how a token knows its place")
    norm: Literal["layernorm", "rmsnorm"] = Field(description="normalisation before each sub-layer and the head")
    norm_eps: PositiveFloat = Field(description="added to the variance in the normalisation")
    activation: Literal["gelu", "swiglu"] = Field(description="feed-forward: two matrices with GELU, or SwiGLU's three")
    bias: bool = Field(description="biases on the linear layers of a block and in layernorm")
    qkv_bias: bool = Field(description="biases on query, key and value; by default as `bias`")
    qk_norm: bool = Field(False, description="normalise each head's queries and keys (arXiv 2302.05442)")
    tied_embeddings: bool = Field(description="the output head is the token embedding")
    rope_base: PositiveFloat = Field(10000.0, description="base of the rotary frequencies (arXiv 2104.09864)")
    rope_scaling: RopeScaling | None = Field(None, description="Llama-3's stretching of the rotary frequencies")
    dropout: float = Field(0.0, ge=0, lt=1, description="on embedding, attention weights and what sub-layers add")
    init_std: PositiveFloat = Field(0.02, description="standard deviation of the initial weights")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Complete the user's fields; wrong types are left for the field's own check to report."""
        if not isinstance(given, dict):
            return given
        given = {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}
        if isinstance(given.get("preset"), bool):
            raise ValueError("preset: needs a name, such as GPT125M; `polarlm models` lists them")
        # A resolved run says every field, and so reads the same where its user's presets are others.
        is_resolved = all(name in given for name, field in cls.model_fields.items() if field.is_required())
        known = given if is_resolved or "preset" not in given else preset_named(str(given["preset"])) | given
        filled = FAMILIES.get(str(known.get("family")), FAMILIES["gpt"]) | known
        for name in ("layers", "hidden", "heads"):
            if name not in filled:
                raise ValueError(f"{name} is missing: give model.{name}, or a model.preset (see `polarlm models`)")
        hidden, heads = (_whole(filled[name]) for name in ("hidden", "heads"))
        filled.setdefault("kv_heads", filled["heads"])
        filled.setdefault("qkv_bias", filled.get("bias"))
        if "head_dim" not in filled and hidden and heads and hidden % heads:
            raise ValueError(
                f"heads: hidden {hidden} is not a multiple of heads {heads}; {_nearest_divisor(hidden, heads)}"
            )
        filled.setdefault("head_dim", hidden // heads if hidden and heads else 1)
        filled.setdefault("ffn", default_ffn(filled.get("activation", "gelu"), hidden or 1))
        return filled

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; "
                f"{_nearest_divisor(self.heads, self.kv_heads)}"
            )
        if self.position_embedding == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim: rotary positions turn pairs, so head_dim must be even, not {self.head_dim}")
        if self.position_embedding != "rotary" and self.rope_scaling is not None:
            raise ValueError("rope_scaling: stretches rotary positions; set model.position_embedding to rotary")
        return self


def _whole(value: Any) -> int | None:
    try:
        return int(value) if 0 < int(value) <= LARGEST_SIZE else None
    except (TypeError, ValueError, OverflowError):
        return None


def _nearest_divisor(of: int, to: int) -> str:
    return f"nearest allowed: {min(divisors(of), key=lambda divisor: abs(divisor - to))}"
