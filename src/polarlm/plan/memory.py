"""Bytes of a run's states, by arithmetic on its layout: what ZeRO shares out (arXiv 1910.02054, Figure 1)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateBytes:
    """Most bytes that one rank holds in a step, apart from activations and buffers.

    Attributes:
        parameters: those that are computed with.
        gradients: of them.
        optimizer: what steps them, and is all that stays between steps: the weights in fp32 and their moments.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    parameters: int, zero_stage: int, shards: int, *, parameter: int = 4, gradient: int = 4, optimizer: int = 12
) -> StateBytes:
    """The states of `parameters` parameters, of which `shards` ranks share out what the stage says.

    In stage 3 parameters are gathered a block at a time; that is in `buffer_bytes`. One process computes with the very
    weights that it steps, and so do ranks that share out nothing: for these `parameter` is 0.

    Args:
        parameters: on this rank's tensor and pipeline part.
        zero_stage: 0 shares out nothing; 1 the optimizer's part, 2 gradients too, 3 all.
        parameter, gradient, optimizer: bytes of one parameter's; by default AdamW in fp32, whatever type
            `train.precision` gives the products, and 4 of the optimizer's 12 are the weight. With
            `train.parameter_precision` bf16 parameters are 2; mixed precision of the paper's kind has 2, 2 and 12.
    """
    shares = [shards if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    held = [parameters * each / share for each, share in zip((parameter, gradient, optimizer), shares, strict=True)]
    return StateBytes(*held)


def buffer_bytes(block_parameters: int) -> int:
    """Most bytes of a ZeRO rank's buffers: a block's parameters and the next one's that are gathered meanwhile, its
    gradients, and two buffers in which gradients are summed over ranks, since one travels while the next is filled."""
    return 5 * 4 * block_parameters
