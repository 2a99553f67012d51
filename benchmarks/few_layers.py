"""What a few of a model's layers say of all of them, by arithmetic.

Blocks are alike, so time and memory are lines in the number of layers: two depths that were measured give the line.
"""

from collections.abc import Mapping
from typing import Any

from polarlm.bench import Row
from polarlm.config import RunConfig
from polarlm.plan import count_parameters, hardware_flops, megatron_tflops_per_device, model_flops, state_bytes


def extrapolate(points: Mapping[int, float], to: int) -> float:
    """The value at `to` of the line through two points."""
    (x, y), (other_x, other_y) = points.items()
    return y + (to - x) * (other_y - y) / (other_x - x)


def one_devices_states(config: RunConfig) -> float:
    """Bytes of one process alone: 16 a parameter."""
    return state_bytes(count_parameters(config.model), 0, 1, parameter=0).total


def foretell(whole: RunConfig, few: list[tuple[RunConfig, Row]], peak_tflops: float | None) -> dict[str, Any] | None:
    """The whole model's step from those of two of its depths, on one device.

    Memory is the states, by arithmetic, and what the measured peaks are beside theirs.

    Args:
        whole: the run of all layers.
        few: runs that differ from it in their layers alone, and what they did; the deeper one last.
        peak_tflops: the device's, for MFU; None where it is not known.

    Returns:
        Times, rates and bytes; None where the deeper run took no longer than the other, which tells of noise alone.
    """
    seconds = {config.model.layers: row.numbers["step_time_s"] for config, row in few}
    shallow, deep = seconds.values()
    if deep <= shallow:
        return None
    peaks = {config.model.layers: row.numbers["peak_memory_bytes"] for config, row in few}
    beside = {config.model.layers: peaks[config.model.layers] - one_devices_states(config) for config, _ in few}
    return {
        "preset": whole.model.preset,
        "seq_len": whole.train.seq_len,
        "measured_layers": list(seconds),
        "outside_layers_time_s": extrapolate(seconds, 0),
        "layer_memory_bytes": extrapolate(peaks, 1) - extrapolate(peaks, 0),
        "state_bytes": one_devices_states(whole),
        "beside_states_bytes": extrapolate(beside, whole.model.layers),
        **rates(whole, extrapolate(seconds, whole.model.layers), peak_tflops),
    }


def rates(config: RunConfig, seconds: float, peak_tflops: float | None) -> dict[str, float | None]:
    """What a step of one device's means, under the names of `metrics.jsonl`."""
    model, train = config.model, config.train
    assert train.global_batch_size is not None
    tokens = train.global_batch_size * train.seq_len
    model_tflops = model_flops(model, tokens, train.seq_len) / seconds / 1e12
    hardware = hardware_flops(model, tokens, train.seq_len, recompute=train.recompute, tile=train.tile)
    megatron = megatron_tflops_per_device(
        model, train.global_batch_size, train.seq_len, seconds=seconds, devices=1, recompute=train.recompute
    )
    return {
        "step_time_s": seconds,
        "tokens_per_sec": tokens / seconds,
        "model_tflops_per_device": model_tflops,
        "hardware_tflops_per_device": hardware / seconds / 1e12,
        "megatron_tflops_per_device": megatron,
        "mfu": model_tflops / peak_tflops if peak_tflops else None,
    }
