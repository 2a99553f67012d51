"""Peak matrix rates of known devices, dense, in TFLOPS, by the type of the product."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DevicePeak:
    """A device as its maker describes it; `pattern` is part of the name that the device gives itself."""

    pattern: str
    bf16: float
    fp32: float  # as torch multiplies fp32 matrices by default, so without TF32
    source: str

    def tflops(self, precision: str) -> float:
        """Peak for `train.precision`; fp16 and bf16 run at one rate on all of these."""
        return self.fp32 if precision == "fp32" else self.bf16


# The first pattern that is found in the name counts, so longer ones stand before their beginnings.
DEVICE_PEAKS = (
    DevicePeak("A100", 312.0, 19.5, "NVIDIA A100 datasheet, 2020"),
    DevicePeak("H100 PCIe", 756.0, 51.0, "NVIDIA H100 datasheet, 2023"),
    DevicePeak("H100", 989.4, 67.0, "NVIDIA H100 datasheet, 2023 (SXM)"),
    DevicePeak("H200", 989.4, 67.0, "NVIDIA H200 datasheet, 2024 (SXM)"),
    DevicePeak("V100", 125.0, 15.7, "NVIDIA V100 datasheet, 2020 (fp16; it has no bf16 units)"),
    DevicePeak("MI250X", 191.5, 47.9, "AMD MI250X datasheet, 2021 (one of its two dies)"),
    DevicePeak("Max 1550", 419.4, 26.2, "Intel Data Center GPU Max product brief, 2023 (one of its two tiles)"),
)


def device_peak(name: str) -> DevicePeak | None:
    """The entry of a device by the name it gives itself, or None for one the table does not know."""
    return next((peak for peak in DEVICE_PEAKS if peak.pattern in name), None)
