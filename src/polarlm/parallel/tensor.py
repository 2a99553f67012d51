"""Tensor parallelism with sequence parallelism (Megatron-LM, arXiv 1909.08053 and 2205.05198).

The ranks of a tensor group share each matrix: attention by heads, feed-forward by columns then rows, embedding and head
by vocabulary. Between the matrices each rank holds S/t tokens of every sequence, so norms, dropout and the residual
stream are shared too. A block's forward pass gathers the sequence twice and scatters sums twice.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from polarlm.model import Attention, Block, CrossEntropy, Documents, Transformer, Vocabulary

_SEQUENCE, _HEADS = 1, 2  # dims of [B, S, H] and of [B, S, A, D]


def share_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Put tensor and sequence parallelism on a model, in place; parts that a pipeline stage lacks are passed over.

    Args:
        mesh: the tensor axis, of at least two ranks that divide the heads and the feed-forward width.
    """
    if model.embedding is not None:
        plan: dict[str, ParallelStyle] = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(_SEQUENCE))
        }
        if model.embedding.positions is not None:
            plan["positions"] = _ShareOutput()
        parallelize_module(model.embedding, mesh, plan)
    for block in model.blocks.values():
        _share_block(block, mesh)
    if model.norm is not None:
        parallelize_module(model.norm, mesh, SequenceParallel())
    if model.head is not None:
        if not model.config.tied_embeddings or model.embedding is None:
            _distribute(model.head, "weight", mesh, Shard(0))
        model.tie_head()
        model.loss = VocabularyParallelCrossEntropy(mesh)


def _share_block(block: Block, mesh: DeviceMesh) -> None:
    gather = PrepareModuleInput(input_layouts=(Shard(_SEQUENCE),), desired_input_layouts=(Replicate(),))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(_SEQUENCE))
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(_SEQUENCE), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.q": columns,
        "attention.output": rows,
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": gather,
        "feed_forward.up": columns,
        "feed_forward.down": rows,
    }
    if hasattr(block.feed_forward, "gate") and block.feed_forward.gate is not None:
        plan["feed_forward.gate"] = columns
    attention = block.attention
    for norm in ("q_norm", "k_norm"):
        if getattr(attention, norm) is not None:
            plan[f"attention.{norm}"] = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
    repeats_kv = (attention.k.out_features // attention.head_dim) % mesh.size() != 0
    for projection in ("k", "v"):
        plan[f"attention.{projection}"] = _Repeat() if repeats_kv else columns
    if repeats_kv:
        _choose_kv_heads(attention, mesh)
        if attention.k_norm is not None:
            plan["attention.k_norm"] = _Repeat()
    parallelize_module(block, mesh, plan)


def _choose_kv_heads(attention: Attention, mesh: DeviceMesh) -> None:
    """Fewer key and value heads than ranks: every rank computes all of them, and attends to those its queries read."""
    heads = attention.q.out_features // attention.head_dim
    kv_heads = attention.k.out_features // attention.head_dim
    local, first = heads // mesh.size(), heads // mesh.size() * mesh.get_local_rank()
    reads = [head * kv_heads // heads for head in range(first, first + local)]
    attention.core = _ChosenKVHeads(attention.core, reads)


class _ChosenKVHeads(nn.Module):
    """A core that hands on, for each local query head, the key and value head that it reads."""

    def __init__(self, core: nn.Module, reads: list[int]) -> None:
        super().__init__()
        self.core = core
        distinct = sorted(set(reads))
        # Grouped attention needs equal groups in order; else each query head gets a copy of its own.
        is_grouped = len(reads) % len(distinct) == 0 and reads == [
            head for head in distinct for _ in range(len(reads) // len(distinct))
        ]
        self._reads = distinct if is_grouped else reads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        return self.core(q, k[:, self._reads], v[:, self._reads], documents)


class _Repeat(ParallelStyle):
    """Every rank holds the whole layer and sees the whole input; each rank's gradient is a part of the sum."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, None, self._take, self._give)

    @staticmethod
    def _take(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> Tensor:
        given = inputs[0]
        return given if isinstance(given, DTensor) else DTensor.from_local(given, mesh, [Replicate()], run_check=False)

    @staticmethod
    def _give(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local(grad_placements=[Partial()])


class _ShareOutput(ParallelStyle):
    """Every rank holds the whole table and looks up its part of the sequence."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, None, self._take, self._give)

    @staticmethod
    def _take(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> DTensor:
        whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(_SEQUENCE)])

    @staticmethod
    def _give(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local()


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Shard) -> None:
    weight = distribute_tensor(getattr(module, name), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(weight))


class VocabularyParallelCrossEntropy(CrossEntropy):
    """`CrossEntropy` over a head shared out by vocabulary; logits are never gathered (arXiv 1909.08053, section 3)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def forward(self, hidden: Tensor, head_weight: DTensor, targets: Tensor) -> Tensor:
        """hidden [B, S, H] shared by sequence, head_weight [V, H] by rows, targets int64 [B, S] -> fp32 scalar."""
        whole = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return self.fused(whole, head_weight.to_local(), targets, _Share(len(head_weight), self._mesh))


class _Share(Vocabulary):
    """A rank's rows, which are shared out as `torch.chunk` does."""

    def __init__(self, size: int, mesh: DeviceMesh) -> None:
        super().__init__(size)
        self.most = -(-size // mesh.size())
        self.first = self.most * mesh.get_local_rank()
        self._group = mesh.get_group()

    def reduce_max(self, values: Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, self._group)

    def reduce_sum(self, values: Tensor) -> None:
        dist.all_reduce(values, group=self._group)
