"""Draw the picture of long-sequences.md: `python docs/draw_long_sequences.py` writes it into docs/pictures/.

What a block keeps from forward to backward is counted: its forward pass runs on tensors that have shapes and no memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from polarlm.config import ModelConfig, load_run
from polarlm.model import Block, Rotary

PICTURE = Path(__file__).parent / "pictures" / "long_sequences.png"
PRESET, LENGTHS, TILE, BYTES = "Llama3_8B", (2048, 131_072), 4096, 2  # of bf16
INK, COLOURS = "#3b3f46", ("#7fa9d8", "#e5a184")
GIB = 2**30


def components(model: ModelConfig, length: int) -> dict[str, float]:
    """Bytes of a step on one sequence, apart from parameters and what is of them; and what each is removed by."""
    attention, feed_forward = block_bytes(model, length)
    blocks, inputs = model.layers, BYTES * length * model.hidden
    assert model.vocab_size is not None
    return {
        "attention scores of one block\nfused attention; by itself": 4 * model.heads * length**2,
        "mask of packed documents\ntheir offsets; by itself": length**2,
        "logits and their gradients\nloss in chunks; by itself": 2 * 4 * length * model.vocab_size,
        "what all blocks keep\nrecompute: full": blocks * (attention + feed_forward),
        "inputs of all blocks\noffload_activations: host": blocks * inputs,
        "feed-forward of one block\ntile: 4096": feed_forward,
        "attention of one block\nparallel.context": attention,
        "what is left on one device": attention + feed_forward * min(1, TILE / length) + 3 * inputs,
    }


def block_bytes(model: ModelConfig, length: int) -> tuple[int, int]:
    """What a block's two halves, attention and feed-forward, keep for their backward passes."""
    with FakeTensorMode(), made_as(torch.bfloat16):
        block = Block(model)
        rotation = Rotary(model)(torch.arange(length)[None])
        hidden = torch.empty(1, length, model.hidden, dtype=torch.bfloat16, requires_grad=True)
        # Of the model, and the turn by positions, which all blocks share.
        others = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *rotation)}
        with counting(others) as attention:
            block.attention(block.attention_norm(hidden), rotation)
        with counting(others) as feed_forward:
            block.transform_tokens(hidden)
    return sum(attention.values()), sum(feed_forward.values())


@contextmanager
def made_as(dtype: torch.dtype) -> Iterator[None]:
    """Within it, parameters are made of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def counting(ignored: set[int]) -> Iterator[dict[int, int]]:
    """The bytes of each storage that is saved for a backward pass."""
    saved: dict[int, int] = {}
    kept = []  # so that no storage's place is taken by another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.append(storage)
        if storage._cdata not in ignored:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def draw() -> Figure:
    """Two bars a component, on a logarithmic axis."""
    flags = ["--model", PRESET, "--train.seq-len", str(max(LENGTHS)), "--train.steps", "1"]
    model = load_run(None, environment={}, flags=flags).config.model
    figure = Figure(figsize=(8, 5.2), dpi=110, layout="constrained")
    panel = figure.subplots()
    for number, (length, colour) in enumerate(zip(LENGTHS, COLOURS, strict=True)):
        sizes = components(model, length)
        places = [place + 0.4 * number - 0.2 for place in range(len(sizes))]
        label = f"{length // 1024}k tokens"
        bars = panel.barh(places, [size / GIB for size in sizes.values()], 0.38, color=colour, label=label)
        panel.bar_label(bars, [_rounded(size / GIB) for size in sizes.values()], padding=3, fontsize=7, color=INK)
    panel.set_yticks(range(len(sizes)), sizes, fontsize=7)
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set_xlabel(f"GiB, {PRESET}, bf16, one sequence", fontsize=8)
    panel.axvline(80e9 / GIB, color=INK, linewidth=1, linestyle=":")
    panel.text(80e9 / GIB, -0.75, "80 GB", ha="center", fontsize=7, color=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="lower right")
    panel.tick_params(labelsize=7)
    return figure


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


if __name__ == "__main__":
    from polarlm.report import save_png

    save_png(draw(), PICTURE)
