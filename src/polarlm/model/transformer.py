"""A decoder-only transformer with normalisation before each sub-layer: the GPT and Llama families by switches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.config import ModelConfig
from polarlm.model.attention import Attention
from polarlm.model.documents import Documents
from polarlm.model.feed_forward import FeedForward
from polarlm.model.layers import Linear, TokenTable, build_norm
from polarlm.model.loss import CrossEntropy
from polarlm.model.rotary import Rotary, Rotation


class Transformer(nn.Module):
    """The whole model, or a pipeline stage of it: a stage sets `embedding`, `norm` and `head` that it lacks to None and
    drops the blocks it lacks, so that every parameter has the same name everywhere.

    Built empty, on the meta device too; `initial.initialise` or a checkpoint gives the weights. With a tied head,
    `head.weight` is `embedding.tokens.weight`, and only that name is listed.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "vocab_size comes from the tokenizer before a model is built"
        assert config.max_positions is not None, "max_positions comes from train.seq_len before a model is built"
        self.config = config
        self.embedding: Embedding | None = Embedding(config)
        self.rotary = Rotary(config) if config.position_embedding == "rotary" else None
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in range(config.layers)})
        self.norm: nn.Module | None = build_norm(config, config.hidden)
        self.head: nn.Linear | None = Linear(config.hidden, config.vocab_size, bias=False)
        self.loss: nn.Module = CrossEntropy()
        self.documents: Callable[[Tensor, torch.device], Any] = Documents  # what the attention cores are told of them
        self.tie_head()

    def forward(
        self, tokens: Tensor, positions: Tensor, document_ids: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Logits [B, S, V]; or with targets the summed loss; or the hidden states [B, S, H] where the head is absent.

        Args:
            tokens: int64 [B, S]; hidden states [B, S, H] where the embedding is absent.
            positions: int64 [B, S], or [1, S] for every row the same; each token's place in its document.
            document_ids: int [B, S], best on the host; a document is a run of one id, and tokens attend only to their
                own. None is one document a row.
            targets: int64 [B, S], the token that should follow each; see `CrossEntropy`.
        """
        hidden = tokens if self.embedding is None else self.embedding(tokens, positions)
        rotation = None if self.rotary is None else self.rotary(positions)
        documents = None if document_ids is None else self.documents(document_ids, hidden.device)
        for block in self.blocks.values():
            hidden = block(hidden, rotation, documents)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden
        return self.head(hidden) if targets is None else self.loss(hidden, self.head.weight, targets)

    @property
    def copies(self) -> dict[str, str]:
        """Parameters that repeat another, and which: the tied head of a pipeline stage, which has a weight of its own.

        Both start equal, and stay so when each takes the sum of their gradients.
        """
        if not self.config.tied_embeddings or self.head is None:
            return {}
        is_tied_here = self.embedding is not None and self.head.weight is self.embedding.tokens.weight
        return {} if is_tied_here else {"head.weight": "embedding.tokens.weight"}

    def tie_head(self) -> None:
        """Make the head's weight the embedding's, where they are tied and both here.

        To be called again by whoever replaces one of the two parameters.
        """
        if self.config.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        super()._apply(fn, recurse)
        self.tie_head()  # leaving the meta device replaces each parameter where it is found, and so cuts the tie
        return self


class Embedding(nn.Module):
    """Token ids to hidden states, with learned positions where the model has them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        learned = config.position_embedding == "learned"
        self.tokens = TokenTable(config.vocab_size, config.hidden)
        self.positions = TokenTable(config.max_positions, config.hidden) if learned else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens int64 [B, S], positions int64 [B, S] or [1, S] -> [B, S, H]."""
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        return self.dropout(hidden)


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the residual stream after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.hidden)
        self.attention = Attention(config)
        self.feed_forward_norm = build_norm(config, config.hidden)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, rotation: Rotation | None, documents: Documents | None = None) -> Tensor:
        """hidden [B, S, H], rotation as from `Rotary` -> [B, S, H]; tokens attend within their own document."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), rotation, documents))
        return hidden + self.transform_tokens(hidden)

    def transform_tokens(self, hidden: Tensor) -> Tensor:
        """The half in which each token stands alone: [B, S, H] -> [B, S, H], what it adds to the residual stream."""
        return self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
