"""What one optimizer step sends between ranks, by the textbook formula of each layout.

Amounts are those of all ranks together. Of b bytes that each rank of a group of n hands to a collective, a rank sends
at least (n-1)/n·b in a reduce-scatter or an all-to-all, (n-1)·b in an all-gather, twice the first in an all-reduce
(Chan et al. 2007, doi 10.1002/cpe.1206). Gradients travel as fp32; parameters and activations too, or as bf16 where
parameters are bf16.

- ZeRO (arXiv 1910.02054, section 7), P parameters: 0: gradients all-reduced, 2P(n-1)/n a step. 1 and 2: parameters
  gathered, P(n-1)/n a step; gradients scattered, P(n-1)/n a step or a microbatch. 3: gathered twice and scattered once
  a microbatch, 3P(n-1)/n. In groups (arXiv 2304.11277) a step's scattered gradients are then all-reduced over the
  groups.
- Tensor with sequence parallel (arXiv 2205.05198, section 4.2.2): 2 all-gathers and 2 reduce-scatters a block forward,
  as many backward; one of each for the embedding and for the head. Megatron gathers twice more backward what it did not
  keep; torch keeps it. The loss reduces 4 numbers a token (arXiv 1909.08053, section 3), and gradients of what each
  rank computes for its part of the sequence, such as norms', are all-reduced when gradients are.
- Ulysses (arXiv 2309.14509, section 3.1): 4 all-to-alls an attention, with q, k and v in one.
- Ring (arXiv 2310.01889): keys and values are sent n-1 times forward; backward, with their gradients, n times.
- Hybrid (arXiv 2405.07719): both, each along its own axis; in the ring a rank has the tokens of all its neighbours, for
  its part of the heads.
- Pipeline (arXiv 2104.04473, section 2.2): hidden states cross each boundary between stages once, their gradients once.
  Schedules that split a backward pass gather and scatter as ZeRO-1 does. The two copies of a tied head trade gradients.
- Besides, three sums of one number over all ranks: trained tokens, loss, who was asked to stop; and for the gradient
  norm a number along each axis that shares parameters out.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from polarlm.config import SPLIT_BACKWARD, RunConfig, pipeline_stages
from polarlm.plan.shapes import Parameter, block_parameters, embedding_parameters, head_parameters

_BF16, _FP32, _FP64 = 2, 4, 8


@dataclass
class Traffic:
    """Calls and bytes of all ranks in one step, by (axis, kind).

    Axes are those of the mesh (replicate, shard, tensor, ring, ulysses, pipeline); one as long as the world is `world`.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes: dict[tuple[str, str], float] = field(default_factory=dict)


def step_traffic(config: RunConfig) -> Traffic:
    """One step's traffic of a resolved run that recomputes nothing, in fp32 or with bf16 parameters; sizes that do not
    divide are not padded."""
    assert config.parallel.ranks is not None
    counter = _Counter(config)
    if config.parallel.ranks > 1:
        _bookkeeping(counter, config)
        _sharding(counter, config)
        _tensor(counter, config)
        _context(counter, config)
        _pipeline(counter, config)
    return counter.traffic


class _Counter:
    """Adds calls up over the ranks that make them."""

    def __init__(self, config: RunConfig) -> None:
        parallel = config.parallel
        assert parallel.ranks is not None
        self.ranks = parallel.ranks
        self.sizes = {
            "world": parallel.ranks,
            "shard": parallel.shards,
            "replicate": parallel.data * parallel.context // parallel.shards,
            "tensor": parallel.tensor,
            "ring": parallel.ring,
            "ulysses": parallel.ulysses,
            "pipeline": parallel.pipeline,
        }
        self.traffic = Traffic()

    def add(self, axis: str, kind: str, ranks: float, calls: float, size: float) -> None:
        """`calls` calls on each of `ranks` ranks, each sending `size` bytes."""
        if self.sizes[axis] == 1 or not calls:
            return
        key = "world" if self.sizes[axis] == self.ranks else axis, kind
        self.traffic.calls[key] = self.traffic.calls.get(key, 0) + round(ranks * calls)
        self.traffic.bytes[key] = self.traffic.bytes.get(key, 0.0) + ranks * calls * size

    def all_reduce(self, axis: str, ranks: float, calls: float, size: float) -> None:
        """Of `size` bytes each."""
        self.add(axis, "all_reduce", ranks, calls, 2 * self._share(axis) * size)

    def gather_or_scatter(self, axis: str, kind: str, ranks: float, calls: float, size: float) -> None:
        """All-gathers to, or reduce-scatters and all-to-alls from, `size` bytes each."""
        self.add(axis, kind, ranks, calls, self._share(axis) * size)

    def _share(self, axis: str) -> float:
        return (self.sizes[axis] - 1) / self.sizes[axis]


def _bookkeeping(counter: _Counter, config: RunConfig) -> None:
    counter.all_reduce("world", counter.ranks, 3, _FP64)
    for axis in ("shard", "tensor", "pipeline"):
        counter.all_reduce(axis, counter.ranks, 1, _FP32)


def _units(config: RunConfig) -> list[list[Parameter]]:
    """The parameters that communicate together: those of a block. Of the others each goes alone where nothing is shared
    out, and else the embedding's together and the rest, with the embedding's if they are tied."""
    model, parallel = config.model, config.parallel
    first = embedding_parameters(model)
    last = head_parameters(model)
    is_tied = model.tied_embeddings and not _has_copy(config)
    if is_tied:
        del last["head.weight"]
    outer = [[each] for each in (first | last).values()]
    if parallel.shards > 1:
        outer = [[*(first | last).values()]] if is_tied else [[*first.values()], [*last.values()]]
    return [*([*block_parameters(model, parallel.tensor).values()] for _ in range(model.layers)), *outer]


def _has_copy(config: RunConfig) -> bool:
    """Whether a tied head stands on another stage than the embedding."""
    return config.model.tied_embeddings and config.parallel.pipeline > 1


def _reductions(config: RunConfig) -> int:
    """How many times a step gradients are reduced."""
    parallel = config.parallel
    each = parallel.zero_stage >= 2 and parallel.shards > 1 and not _splits_backward(config)
    return _microbatches(config) if each else 1


def _splits_backward(config: RunConfig) -> bool:
    return config.parallel.pipeline > 1 and config.parallel.pipeline_schedule in SPLIT_BACKWARD


def _microbatches(config: RunConfig) -> int:
    assert config.train.gradient_accumulation_steps is not None
    return config.train.gradient_accumulation_steps


def _sharding(counter: _Counter, config: RunConfig) -> None:
    parallel = config.parallel
    ranks = counter.ranks / parallel.pipeline  # those that hold a unit
    gathers = 2 * _microbatches(config) if parallel.zero_stage == 3 and not _splits_backward(config) else 1
    for unit in _units(config):
        held = sum(parameter.held(parallel.tensor) for parameter in unit)
        size = _FP32 * held
        counter.gather_or_scatter("shard", "all_gather", ranks, gathers, _value(config) * held)
        counter.gather_or_scatter("shard", "reduce_scatter", ranks, _reductions(config), size)
        counter.all_reduce("replicate", ranks, 1, size / parallel.shards)


def _tensor(counter: _Counter, config: RunConfig) -> None:
    model = config.model
    microbatches = _microbatches(config)
    ranks = counter.ranks / config.parallel.pipeline
    tokens = _tokens(config)
    exchanges = (4 * model.layers + 2) * microbatches
    for kind in ("all_gather", "reduce_scatter"):
        counter.gather_or_scatter("tensor", kind, ranks, exchanges, tokens * model.hidden * _value(config))
    counter.all_reduce("tensor", ranks, microbatches, tokens * _FP32)
    counter.all_reduce("tensor", ranks, microbatches, 3 * tokens * _FP32)
    # Before they are summed over the other axes, in which they are fp32; so are those that lie in the parameters' own
    # type, and what microbatches were added up in.
    is_fp32 = config.parallel.shards == 1 or _reductions(config) < microbatches
    each = _FP32 if is_fp32 else _value(config)
    for parameter in (parameter for unit in _units(config) for parameter in unit if parameter.summed):
        counter.all_reduce("tensor", ranks, _reductions(config), parameter.size * each)


def _context(counter: _Counter, config: RunConfig) -> None:
    model, parallel = config.model, config.parallel
    ring, ulysses = parallel.ring, parallel.ulysses
    ranks = counter.ranks / parallel.pipeline
    shares_kv = model.kv_heads % parallel.tensor == 0
    heads = model.heads // parallel.tensor
    kv_heads = model.kv_heads // parallel.tensor if shares_kv else _read_kv_heads(model.heads, model.kv_heads, heads)
    head = _tokens(config) * model.head_dim * _value(config)
    calls = model.layers * _microbatches(config)
    kv_heads = max(kv_heads, ulysses)  # fewer than ranks are repeated
    counter.gather_or_scatter("ulysses", "all_to_all", ranks, 2 * calls, (heads + 2 * kv_heads) * head)
    counter.gather_or_scatter("ulysses", "all_to_all", ranks, 2 * calls, heads * head)
    # Of u times fewer heads for u times as many tokens.
    counter.add("ring", "send", ranks, calls * (ring - 1), 2 * kv_heads * head)
    counter.add("ring", "send", ranks, calls * ring, 4 * kv_heads * head)


def _read_kv_heads(heads: int, kv_heads: int, local: int) -> int:
    """How many key heads the query heads of one tensor rank read."""
    return len({head * kv_heads // heads for head in range(local)})


def _pipeline(counter: _Counter, config: RunConfig) -> None:
    model, parallel = config.model, config.parallel
    ranks = [stage.rank for stage in pipeline_stages(config)]
    boundaries = sum(one != other for one, other in pairwise(ranks))
    hidden = _tokens(config) // parallel.tensor * model.hidden * _value(config)
    lines = counter.ranks / parallel.pipeline
    counter.add("pipeline", "send", lines, 2 * boundaries * _microbatches(config), hidden)
    if _has_copy(config) and ranks[0] != ranks[-1]:
        tied = head_parameters(model)["head.weight"].held(parallel.tensor) / parallel.shards
        counter.add("pipeline", "send", lines, 2, tied * _FP32)


def _value(config: RunConfig) -> int:
    """Bytes of a number of a gathered parameter, or of an activation."""
    return _BF16 if config.train.parameter_precision == "bf16" else _FP32


def _tokens(config: RunConfig) -> int:
    """Of a microbatch, on a rank of a context group."""
    return config.train.micro_batch_size * config.train.seq_len // config.parallel.context
