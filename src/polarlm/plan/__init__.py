"""Arithmetic on a run: parameters, FLOPs, memory, traffic, device peaks.

No torch; the one place for every such formula.
"""

from polarlm.plan.devices import DEVICE_PEAKS, DevicePeak, device_peak
from polarlm.plan.flops import (
    attention_score_flops,
    block_forward_flops,
    hardware_flops,
    head_forward_flops,
    megatron_tflops_per_device,
    model_flops,
)
from polarlm.plan.memory import StateBytes, buffer_bytes, state_bytes
from polarlm.plan.parameters import count_parameters
from polarlm.plan.traffic import Traffic, step_traffic

__all__ = [
    "DEVICE_PEAKS",
    "DevicePeak",
    "StateBytes",
    "Traffic",
    "attention_score_flops",
    "block_forward_flops",
    "buffer_bytes",
    "count_parameters",
    "device_peak",
    "hardware_flops",
    "head_forward_flops",
    "megatron_tflops_per_device",
    "model_flops",
    "state_bytes",
    "step_traffic",
]
