"""The arithmetic of layouts and batches: which products are possible, and what a run's open fields then become."""

from polarlm.config.divisors import divisors
from polarlm.config.errors import UserError
from polarlm.config.run import RunConfig
from polarlm.config.stages import SPLIT_BACKWARD, V_SHAPED


def resolve_layout(config: RunConfig, devices: int) -> RunConfig:
    """The same run with ranks, steps and batch made explicit.

    Args:
        config: the run as given; `parallel.ranks`, one of the two batch fields and one of steps and tokens may be open.
        devices: what `parallel.ranks` is by default (at least 1).

    Raises:
        UserError: a product that is impossible; one line a fault, each with the field, the numbers and the nearest
            allowed value.
    """
    parallel = config.parallel
    ranks = parallel.ranks or max(1, devices)
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
    }
    layout = [f"{axis}{degree}" for axis, degree in axes.items() if axis == "dp" or degree > (axis != "zero")]
    shape = f"{model.preset or model.family}-{model.layers}x{model.hidden}"
    return "-".join([shape, f"s{train.seq_len}", f"gb{train.global_batch_size}", *layout])


def _layout_faults(config: RunConfig, ranks: int) -> list[str]:
    model, train, parallel = config.model, config.train, config.parallel
    product = parallel.tensor * parallel.pipeline * parallel.context
    # Zig-zag ring attention gives each rank two chunks of the sequence, so that causal work is balanced.
    shards = parallel.context * (2 if parallel.context_method == "ring" and parallel.context > 1 else 1)
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
        ("parallel.tensor", "train.seq_len", train.seq_len, "tensor", parallel.tensor),
        ("parallel.pipeline", "model.layers", model.layers, "pipeline", parts),
        ("parallel.context", "train.seq_len", train.seq_len, "the sequence shards", shards),
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
    if parallel.offload == "optimizer" and train.optimizer.name != "adamw":
        faults.append(
            f"parallel.offload: optimizer is for train.optimizer.name adamw, not {train.optimizer.name}; "
            "use parallel.offload parameters or none, or adamw"
        )
    return faults + _context_faults(config) + _pipeline_faults(config)


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
    if schedule in SPLIT_BACKWARD and config.train.compile:
        faults.append(
            f"train.compile: {schedule} goes backward through a block in two parts, which compiled code cannot; "
            "use parallel.pipeline_schedule interleaved1f1b, or train.compile false"
        )
    if split is None and parallel.stages > layers:
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


def _context_faults(config: RunConfig) -> list[str]:
    """What the two ways across sequence shards ask of a model."""
    model, parallel = config.model, config.parallel
    if parallel.context == 1:
        return []
    if parallel.context_method == "ring":
        faults = []
        if model.dropout:
            faults.append(
                f"model.dropout: {model.dropout} also drops attention weights, which ring attention never holds "
                "whole; use parallel.context_method ulysses, or dropout 0"
            )
        return faults
    heads, kv_heads = model.heads // parallel.tensor, max(1, model.kv_heads // parallel.tensor)
    allowed = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if parallel.context in allowed:
        return []
    return [
        f"parallel.context: {parallel.context} ranks cannot share {heads} query and {kv_heads} key heads by ulysses; "
        f"allowed: {', '.join(map(str, allowed))}; or use parallel.context_method ring"
    ]


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
