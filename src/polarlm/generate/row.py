"""One prompt and what the model has written after it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from polarlm.data import TextStream, Tokenizer
from polarlm.generate.sampling import Sampler
from polarlm.generate.settings import Settings
from polarlm.generate.stop import StopStrings

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """What a model wrote after one prompt.

    Attributes:
        text: without the stop text that ended it.
        ids: every token written, except the end of document.
        finish_reason: "stop" at the end of document or a stop text, "length" at `max_tokens` or the end of the
            model's context.
        prompt_tokens: tokens read.
        completion_tokens: tokens chosen, the end of document among them.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class Row:
    """Takes one prompt's logits step by step, and turns them into tokens and text until it is finished."""

    def __init__(
        self,
        prompt_ids: list[int],
        settings: Settings,
        tokenizer: Tokenizer,
        room: int,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """`room`: tokens that fit in the model's context after the prompt. `on_text` hears text once it is certain."""
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.most_tokens = min(settings.max_tokens, room)
        self.finish_reason: FinishReason | None = None if self.most_tokens else "length"
        self._eod_id = tokenizer.eod_id
        self._chosen = 0
        self._sampler = Sampler(settings, tokenizer.vocab_size)
        self._stream = TextStream(tokenizer)
        self._stop = StopStrings(settings.stop)
        self._pieces: list[str] = []
        self._on_text = on_text

    def take(self, logits: Tensor) -> None:
        """Choose the next token from its logits [V]; nothing where the row has finished."""
        if self.finish_reason is not None:
            return
        token = self._sampler(logits)
        self._chosen += 1
        if token == self._eod_id:
            self._finish("stop")
            return
        self.ids.append(token)
        self._write(self._stop.push(self._stream.push(token)))
        if self._stop.stopped:
            self.finish_reason = "stop"
        elif self._chosen == self.most_tokens:
            self._finish("length")

    def completion(self) -> Completion:
        """The finished row as a plain value."""
        assert self.finish_reason is not None
        return Completion(
            text="".join(self._pieces),
            ids=self.ids,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=self._chosen,
        )

    def _finish(self, reason: FinishReason) -> None:
        """No more tokens come: what was held back is certain now, unless it completes a stop text after all."""
        self._write(self._stop.push(self._stream.flush()))
        if not self._stop.stopped:
            self._write(self._stop.flush())
        self.finish_reason = "stop" if self._stop.stopped else reason

    def _write(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        if self._on_text is not None:
            self._on_text(text)
