"""The transformer as one device sees it: embedding, attention, feed-forward, block, loss, initial values.

It knows no mesh and no rank. Tensor, pipeline and context parallelism, sharding, recomputation and compilation are put
on it from outside, by its sub-modules' names and by replacing `attention.core` and `loss`.
"""

from polarlm.model.attention import Attention, CausalAttention
from polarlm.model.documents import Documents
from polarlm.model.feed_forward import FeedForward
from polarlm.model.initial import draw, initialise
from polarlm.model.layers import RMSNorm
from polarlm.model.loss import IGNORED, CrossEntropy, Vocabulary
from polarlm.model.rotary import Rotary
from polarlm.model.transformer import Block, Embedding, Transformer

__all__ = [
    "IGNORED",
    "Attention",
    "Block",
    "CausalAttention",
    "CrossEntropy",
    "Documents",
    "Embedding",
    "FeedForward",
    "RMSNorm",
    "Rotary",
    "Transformer",
    "Vocabulary",
    "draw",
    "initialise",
]
