"""The loop that lets a model write: read the prompts, then choose each row's next token and read it, until all end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from polarlm.config import UserError
from polarlm.data import Tokenizer, encode_prompt
from polarlm.generate.cache import KVCache
from polarlm.generate.row import Completion, Row
from polarlm.generate.settings import Settings
from polarlm.model import Transformer

# Prompts are read this many columns at a time, so that memory does not grow with the square of their length.
PREFILL_COLUMNS = 512
_PAD = 0  # any id will do: no token sees a pad


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: Settings | Sequence[Settings],
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Complete prompts side by side; each comes out as if it were alone.

    Args:
        model: on any device and in any mode; it is left as it was.
        tokenizer: the one the model was trained with.
        prompts: an empty one starts from the end-of-document token.
        settings: one for all, or one a prompt.
        on_text: called with (prompt number, text) as soon as whole characters are certain; the pieces join to the text.

    Raises:
        UserError: a prompt longer than the model's context, an empty one where there is no end-of-document token, or
            a tokenizer that is not the model's.
    """
    each = [settings] * len(prompts) if isinstance(settings, Settings) else settings
    rows = []
    for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        ids = _encode(tokenizer, prompt, model)
        hears = None if on_text is None else partial(on_text, number)
        rows.append(Row(ids, one, tokenizer, model.config.max_positions - len(ids), hears))
    unfinished = [row for row in rows if row.finish_reason is None]
    was_training = model.training
    model.eval()
    try:
        if unfinished:
            _write(model, unfinished)
    finally:
        model.train(was_training)
    return [row.completion() for row in rows]


def _encode(tokenizer: Tokenizer, prompt: str, model: Transformer) -> list[int]:
    config = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"data.tokenizer: has {tokenizer.vocab_size} ids, and the model only {config.vocab_size}; "
            "use the tokenizer that the model was trained with"
        )
    return encode_prompt(tokenizer, prompt, config.max_positions)


def _write(model: Transformer, rows: list[Row]) -> None:
    """Let every row come to its end. A row that has ended goes on as pads until the others have."""
    tokens, is_real = _left_padded([row.prompt_ids for row in rows], next(model.parameters()).device)
    capacity = tokens.shape[1] + max(row.most_tokens for row in rows)
    with KVCache(model, capacity) as cache, _last_column_only(model):
        for some, real in zip(tokens.split(PREFILL_COLUMNS, 1), is_real.split(PREFILL_COLUMNS, 1), strict=True):
            logits = cache.read(some, real)
        while True:
            for row, row_logits in zip(rows, logits[:, -1].cpu(), strict=True):
                row.take(row_logits)
            goes_on = [row.finish_reason is None for row in rows]
            if not any(goes_on):
                return
            following = [row.ids[-1] if on else _PAD for row, on in zip(rows, goes_on, strict=True)]
            logits = cache.read(tokens.new_tensor(following)[:, None], is_real.new_tensor(goes_on)[:, None])


def _left_padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one int64 [B, S], all ending in the last column, and where they are real, bool [B, S]."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[_PAD] * (width - len(ids)) + ids for ids in prompts], device=device)
    is_real = torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in prompts], device=device)
    return tokens, is_real


@contextmanager
def _last_column_only(model: Transformer) -> Iterator[None]:
    """The head, the largest matrix of a small model, is spent on the one column whose next token is asked for."""
    assert model.head is not None
    handle = model.head.register_forward_pre_hook(lambda head, inputs: (inputs[0][:, -1:],))
    try:
        yield
    finally:
        handle.remove()
