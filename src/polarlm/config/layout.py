"""The arithmetic of layouts and batches: which products are possible, and what a run's open fields then become."""

import math

from polarlm.config.divisors import divisors
from polarlm.config.errors import UserError
from polarlm.config.run import ParallelConfig, RunConfig
from polarlm.config.stages import SPLIT_BACKWARD, V_SHAPED


def resolve_layout(config: RunConfig, devices: int, nodes: int = 1) -> RunConfig:
    """The same run with ranks, steps and batch made explicit.

    Args:
        config: the run as given; `parallel.ranks`, one of the two batch fields, one of steps and tokens, and under
            hybrid `parallel.context_ulysses` may be open.
        devices: what `parallel.ranks` is by default (at least 1).
        nodes: what these devices are spread over.

    Raises:
        UserError: a product that is impossible; one line a fault, each with the field, the numbers and the nearest
            allowed value.
    """
    ranks = config.parallel.ranks or max(1, devices)
    config = _with_ulysses(config, max(1, max(ranks, devices) // nodes))
    parallel = config.parallel
    faults = _layout_faults(config, ranks)
    if faults:
        raise UserError(*faults)
    data_parallel = ranks // (parallel.tensor * parallel.pipeline * parallel.context)
    global_batch, accumulation = _batch(config, data_parallel)
    if fault := _microbatch_faults(config, accumulation):
        raise UserError(fault)

    train = config.train
    tokens_per_step = global_batch * train.seq_len
    steps = train.steps or -(-(train.tokens or 0) // tokens_per_step)
    schedule = train.schedule
    if schedule.warmup_tokens is not None:
        warmup = -(-schedule.warmup_tokens // tokens_per_step)
        schedule = schedule.model_copy(update={"warmup_steps": warmup, "warmup_tokens": None})
    if schedule.warmup_steps > steps:
        raise UserError(
            f"train.schedule.warmup_steps: {schedule.warmup_steps} is more than the run's {steps} steps "
            f"({train.tokens} tokens at {tokens_per_step} a step)"
        )
    if schedule.name == "wsd" and (schedule.decay_steps or 0) > steps - schedule.warmup_steps:
        raise UserError(
            f"train.schedule.decay_steps: {schedule.decay_steps} is more than the {steps - schedule.warmup_steps} "
            f"steps after the warm-up (train.steps {steps}, warmup_steps {schedule.warmup_steps})"
        )
    ends = [phase.until_step for phase in train.seq_len_schedule]
    if ends and ends[-1] > steps:
        raise UserError(
            f"train.seq_len_schedule: until_step {ends[-1]} is past the run's {steps} steps; use {steps} at most, or "
            f"give more train.{'steps' if train.steps else 'tokens'}"
        )
    open_fields = {
        "steps": steps,
        "schedule": schedule,
        "tokens": None,  # now said by steps
        "global_batch_size": global_batch,
        "gradient_accumulation_steps": accumulation,
    }
    return config.model_copy(
        update={
            "train": train.model_copy(update=open_fields),
            "parallel": parallel.model_copy(update={"ranks": ranks}),
        }
    )


def default_name(config: RunConfig) -> str:
    """A name that says model, layout and batch of a resolved run, such as `GPT125M-12x768-s1024-gb64-dp2`."""
    model, train, parallel = config.model, config.train, config.parallel
    axes = {
        "dp": parallel.data,
        "zero": parallel.zero_stage,
        "tp": parallel.tensor,
        "pp": parallel.pipeline,
        "cp": parallel.context,
        "ulysses": parallel.context_ulysses or 1,
    }
    layout = [f"{axis}{degree}" for axis, degree in axes.items() if axis == "dp" or degree > (axis != "zero")]
    shape = f"{model.preset or model.family}-{model.layers}x{model.hidden}"
    return "-".join([shape, f"s{train.seq_len}", f"gb{train.global_batch_size}", *layout])


def _layout_faults(config: RunConfig, ranks: int) -> list[str]:
    model, train, parallel = config.model, config.train, config.parallel
    product = parallel.tensor * parallel.pipeline * parallel.context
    parts = 1 if parallel.pipeline_split else parallel.pipeline
    faults = []
    if ranks % product:
        faults.append(
            f"parallel.ranks: {ranks} is not a multiple of tensor {parallel.tensor} x pipeline {parallel.pipeline} "
            f"x context {parallel.context} = {product}; nearest allowed: {_nearest_multiples(ranks, product)}"
        )
    for field, whole_name, whole, part_name, part in (
        ("parallel.hybrid", "data-parallel ranks", ranks // product or 1, "hybrid", parallel.hybrid or 1),
        ("parallel.tensor", "model.heads", model.heads, "tensor", parallel.tensor),
        ("parallel.tensor", "model.ffn", model.ffn, "tensor", parallel.tensor),
        ("parallel.pipeline", "model.layers", model.layers, "pipeline", parts),
    ):
        if whole % part:
            nearest = min(divisors(whole), key=lambda divisor: abs(divisor - part))
            faults.append(
                f"{field}: {whole_name} {whole} is not a multiple of {part_name} {part}; nearest allowed: {nearest}"
            )
    if train.recompute_every > model.layers:
        faults.append(
            f"train.recompute_every: {train.recompute_every} is more than model.layers {model.layers}; "
            f"nearest allowed: {model.layers}"
        )
    if train.compile and parallel.tensor > 1:
        faults.append(
            f"train.compile: torch's compiler fails on matrices that {parallel.tensor} tensor-parallel ranks share; "
            "use parallel.tensor 1, or train.compile false"
        )
    if (
        train.compile
        and ranks == 1
        and train.parameter_precision != "fp32"
        and (train.recompute != "none" or train.tile)
    ):
        faults.append(
            "train.parameter_precision: one process casts inside of what train.recompute or train.tile computes again, "
            "and torch's compiler takes no such cast; use train.parameter_precision fp32, or train.compile false"
        )
    if parallel.offload == "parameters" and ranks == 1:
        faults.append(
            "parallel.offload: parameters are fetched by the ranks that share them out, and this run has 1; "
            "use parallel.offload optimizer, or more ranks"
        )
    if parallel.offload == "optimizer" and train.optimizer.name != "adamw":
        faults.append(
            f"parallel.offload: optimizer is for train.optimizer.name adamw, not {train.optimizer.name}; "
            "use parallel.offload parameters or none, or adamw"
        )
    faults += _switch_faults(config)
    return faults + _schedule_faults(config) + _context_faults(config) + _pipeline_faults(config)


def _switch_faults(config: RunConfig) -> list[str]:
    """Switches that would change nothing, for the run has not what they are of."""
    norm, train, optimizer = config.model.norm, config.train, config.train.optimizer
    faults = []
    if train.recompute_every > 1 and train.recompute == "none":
        faults.append(
            f"train.recompute_every: {train.recompute_every} is of blocks that recompute, and train.recompute is none; "
            "use train.recompute selective or full, or leave it out"
        )
    if norm != "rmsnorm" and not train.fused_norms:
        faults.append(
            f"train.fused_norms: false is RMSNorm's plain formula, and model.norm is {norm}; leave it out, or use "
            "model.norm rmsnorm"
        )
    if optimizer.name == "adafactor" and not optimizer.fused:
        faults.append(
            f"train.optimizer.fused: false is a way of AdamW's steps, and train.optimizer.name is {optimizer.name}; "
            "leave it out, or use adamw or muon"
        )
    return faults


def sequence_unit(parallel: ParallelConfig) -> int:
    """What the length of a sequence is a multiple of where each of its ranks holds a share of it, all alike."""
    # A zig-zag ring gives each of its ranks two chunks of the sequence, so that causal work is balanced.
    chunks = 2 * parallel.ring if parallel.ring > 1 else 1
    return math.lcm(parallel.context * parallel.tensor, chunks)


def _schedule_faults(config: RunConfig) -> list[str]:
    """What is said of tokens and lengths over time."""
    train, unit = config.train, sequence_unit(config.parallel)
    if config.data.samples == "documents":
        given = {
            "train.seq_len_schedule": bool(train.seq_len_schedule),
            "train.tokens": train.tokens is not None,
            "train.schedule.warmup_tokens": train.schedule.warmup_tokens is not None,
        }
        why = "where data.samples is documents, each step has as many tokens as its documents; give steps instead"
        return [f"{field}: {why}" for field, is_given in given.items() if is_given]
    allowed = [length for length in divisors(train.seq_len) if length % unit == 0] or [train.seq_len]
    return [
        f"train.seq_len_schedule: {phase.seq_len} until step {phase.until_step} does not divide train.seq_len "
        f"{train.seq_len} into sequences of a multiple of {unit} (tensor x context, twice for a ring); "
        f"nearest allowed: {min(allowed, key=lambda length: abs(length - phase.seq_len))}"
        for phase in train.seq_len_schedule
        if phase.seq_len not in allowed
    ]


def _pipeline_faults(config: RunConfig) -> list[str]:
    """What a schedule asks of the stages."""
    parallel, layers = config.parallel, config.model.layers
    schedule, each, split = parallel.pipeline_schedule, parallel.pipeline_stages_per_rank, parallel.pipeline_split
    if parallel.pipeline == 1:
        return []
    faults = []
    if schedule in ("gpipe", "1f1b") and each not in (None, 1):
        faults.append(f"parallel.pipeline_stages_per_rank: {schedule} has 1, not {each}; or use interleaved1f1b")
    if schedule in V_SHAPED and each not in (None, 2):
        faults.append(f"parallel.pipeline_stages_per_rank: {schedule} has 2, not {each}; or use interleaved1f1b")
    if schedule in SPLIT_BACKWARD and config.train.recompute == "selective":
        faults.append(
            f"train.recompute: {schedule} goes backward through a block twice, and what selective keeps serves once; "
            "use full, or parallel.pipeline_schedule 1f1b"
        )
    if schedule in SPLIT_BACKWARD and config.train.parameter_precision != "fp32":
        faults.append(
            f"train.parameter_precision: {schedule} adds microbatches' gradients up in the parameters' own type, which "
            "loses what is small; use parallel.pipeline_schedule interleaved1f1b, or train.parameter_precision fp32"
        )
    if schedule in SPLIT_BACKWARD and config.train.compile:
        faults.append(
            f"train.compile: {schedule} goes backward through a block in two parts, which compiled code cannot; "
            "use parallel.pipeline_schedule interleaved1f1b, or train.compile false"
        )
    if split is None and parallel.stages > max(layers, parallel.pipeline):  # one a rank is said of layers already
        faults.append(
            f"parallel.pipeline: {schedule} on {parallel.pipeline} ranks has {parallel.stages} stages, "
            f"and model.layers {layers} is fewer; use 1f1b, or fewer stages"
        )
    if split is not None and (len(split) != parallel.stages or sum(split) != layers):
        faults.append(
            f"parallel.pipeline_split: {len(split)} stages of {sum(split)} layers, "
            f"but the run has {parallel.stages} stages and model.layers {layers}"
        )
    return faults


def _microbatch_faults(config: RunConfig, microbatches: int) -> str | None:
    """What a schedule asks of the number of microbatches in a step."""
    parallel = config.parallel
    ranks, schedule = parallel.pipeline, parallel.pipeline_schedule
    if ranks == 1:
        return None
    if schedule == "dualpipev" and microbatches < parallel.stages:
        allowed = f"at least {parallel.stages}, one for each stage"
    elif schedule in ("interleaved1f1b", "interleavedzerobubble") and microbatches % max(1, microbatches // ranks):
        allowed = f"a multiple of parallel.pipeline {ranks}: {_nearest_multiples(microbatches, ranks)}"
    else:
        return None
    field = "train.gradient_accumulation_steps"
    return f"{field}: {schedule} on {ranks} ranks takes {allowed}; the batch gives {microbatches}"


def _with_ulysses(config: RunConfig, node: int) -> RunConfig:
    """The run with `parallel.context_ulysses` explicit under hybrid.

    Args:
        node: ranks of a node, in which those that share heads are to be, tensor ranks between them.
    """
    parallel = config.parallel
    if parallel.context_method != "hybrid" or parallel.context_ulysses is not None:
        return config
    possible = [n for n in _shares_of_heads(config) if parallel.context % n == 0 and node % (n * parallel.tensor) == 0]
    parallel = parallel.model_copy(update={"context_ulysses": max(possible, default=1)})
    return config.model_copy(update={"parallel": parallel})


def _shares_of_heads(config: RunConfig) -> list[int]:
    """By how many ranks the heads of a tensor rank can be shared."""
    heads, kv_heads = _local_heads(config)
    return [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]


def _local_heads(config: RunConfig) -> tuple[int, int]:
    """Query and key heads of a tensor rank; at least 1, for a layout that is not checked yet."""
    model, tensor = config.model, config.parallel.tensor
    return max(1, model.heads // tensor), max(1, model.kv_heads // tensor)


def _context_faults(config: RunConfig) -> list[str]:
    """What the ways across sequence shards ask of a model and its sequences."""
    model, train, parallel = config.model, config.train, config.parallel
    if parallel.context_ulysses is not None and parallel.context_method != "hybrid":
        return [
            f"parallel.context_ulysses: {parallel.context_ulysses} is for parallel.context_method hybrid, "
            f"not {parallel.context_method}; leave it out"
        ]
    if parallel.context % parallel.ulysses:
        nearest = min(divisors(parallel.context), key=lambda divisor: abs(divisor - parallel.ulysses))
        return [
            f"parallel.context_ulysses: parallel.context {parallel.context} is not a multiple of context_ulysses "
            f"{parallel.ulysses}; nearest allowed: {nearest}"
        ]
    faults = []
    unit = sequence_unit(parallel)
    if train.seq_len % unit:
        faults.append(
            f"parallel.{'context' if parallel.context > 1 else 'tensor'}: train.seq_len {train.seq_len} is not a "
            f"multiple of {unit}, for context {parallel.context} x tensor {parallel.tensor} ranks share it"
            f"{f' and a ring cuts it into {2 * parallel.ring}' if parallel.ring > 1 else ''}; "
            f"nearest allowed train.seq_len: {_nearest_multiples(train.seq_len, unit)}"
        )
    if parallel.ring > 1 and model.dropout:
        faults.append(
            f"model.dropout: {model.dropout} also drops attention weights, which ring attention never holds "
            "whole; use parallel.context_method ulysses, or dropout 0"
        )
    is_hybrid = parallel.context_method == "hybrid"
    allowed = [n for n in _shares_of_heads(config) if not is_hybrid or parallel.context % n == 0]
    if parallel.ulysses not in allowed:
        field = "parallel.context_ulysses" if is_hybrid else "parallel.context"
        heads, kv_heads = _local_heads(config)
        faults.append(
            f"{field}: {parallel.ulysses} ranks cannot share {heads} query and {kv_heads} key heads by ulysses; "
            f"allowed: {', '.join(map(str, allowed))}; or use parallel.context_method ring"
        )
    return faults


def _nearest_multiples(number: int, unit: int) -> str:
    below, above = number // unit * unit, -(-number // unit) * unit
    return " or ".join(str(multiple) for multiple in (below, above) if multiple)


def _batch(config: RunConfig, data_parallel: int) -> tuple[int, int]:
    """(global batch, microbatches a rank and step): global = micro x accumulation x data-parallel ranks."""
    train = config.train
    unit = train.micro_batch_size * data_parallel
    equation = f"train.micro_batch_size {train.micro_batch_size} x data-parallel ranks {data_parallel}"
    if train.global_batch_size is None:
        accumulation = train.gradient_accumulation_steps or 1
        return unit * accumulation, accumulation
    if train.global_batch_size % unit:
        raise UserError(
            f"train.global_batch_size: {train.global_batch_size} is not a multiple of {equation} = {unit}; "
            f"nearest allowed: {_nearest_multiples(train.global_batch_size, unit)}"
        )
    accumulation = train.global_batch_size // unit
    if train.gradient_accumulation_steps not in (None, accumulation):
        raise UserError(
            f"train.gradient_accumulation_steps: {equation} x {train.gradient_accumulation_steps} = "
            f"{unit * (train.gradient_accumulation_steps or 0)}, but train.global_batch_size is "
            f"{train.global_batch_size}; leave one of the two out, or use {accumulation}"
        )
    return train.global_batch_size, accumulation
