"""What a step's time means: tokens and FLOPs a second, and the share of the device's peak."""

import time
from typing import Any

import torch

from polarlm.config import RunConfig
from polarlm.data import StepShape
from polarlm.parallel import Device
from polarlm.plan import device_peak, hardware_flops, megatron_tflops_per_device, model_flops


class Speedometer:
    """Turns the seconds of a step into the numbers of `metrics.jsonl`.

    Everything is counted from the global batch and whole sequences, then shared over all devices; so a tensor- or
    sequence-parallel rank never counts its group's work as its own. What is padded counts as the hardware's work alone.
    """

    def __init__(self, config: RunConfig, device: Device) -> None:
        train, ranks = config.train, config.parallel.ranks
        self._config, self._ranks = config, ranks
        tokens = train.global_batch_size * train.seq_len
        self._whole = StepShape(train.seq_len, tokens, tokens)
        self.peak_tflops = peak_tflops(device, train.precision)

    def measure(self, seconds: float, shape: StepShape | None = None) -> dict[str, Any]:
        """The rates of one step that took `seconds`; by default a step of whole samples."""
        model, train = self._config.model, self._config.train
        shape = shape or self._whole
        model_tflops = model_flops(model, shape.tokens, shape.seq_len) / seconds / self._ranks / 1e12
        hardware = hardware_flops(
            model,
            shape.positions,
            shape.seq_len,
            recompute=train.recompute,
            recompute_every=train.recompute_every,
            tile=train.tile,
        )
        return {
            "step_time_s": seconds,
            "samples_per_sec": train.global_batch_size / seconds,
            "tokens_per_sec": shape.tokens / seconds,
            "tokens_per_sec_per_device": shape.tokens / seconds / self._ranks,
            "model_tflops_per_device": model_tflops,
            "hardware_tflops_per_device": hardware / seconds / self._ranks / 1e12,
            "megatron_tflops_per_device": megatron_tflops_per_device(
                model,
                shape.positions // shape.seq_len,
                shape.seq_len,
                seconds=seconds,
                devices=self._ranks,
                recompute=train.recompute,
            ),
            "mfu": model_tflops / self.peak_tflops,
        }


def peak_tflops(device: Device, precision: str) -> float:
    """The device's peak matrix rate: from the table of known devices, else the best of a few products here and now."""
    known = device_peak(device.name)
    return known.tflops(precision) if known else _measured_tflops(device)


def _measured_tflops(device: Device, size: int = 512, tries: int = 40) -> float:
    """Best rate of a square fp32 product; on a CPU with this rank's threads, while the other ranks measure theirs.

    Many short tries: on a machine that others use too, one of them runs undisturbed.
    """
    left, right = torch.rand(2, size, size, device=device.torch).unbind()
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        torch.mm(left, right)
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12
