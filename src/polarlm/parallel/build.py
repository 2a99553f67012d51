"""From a model's shape to this rank's part of it, ready to train: the one place where parallelism meets the model."""

import torch
from torch import nn

from polarlm.config import RunConfig
from polarlm.model import Transformer, draw
from polarlm.parallel.compile import compile_blocks
from polarlm.parallel.context import share_sequences
from polarlm.parallel.mesh import Mesh
from polarlm.parallel.shard import distribute, shard
from polarlm.parallel.tensor import share_matrices


def build_model(config: RunConfig, mesh: Mesh) -> Transformer:
    """The run's model on this rank's device, with its initial weights.

    It is laid out on the meta device first, so that no rank ever holds more than its part and one whole parameter.
    """
    with torch.device("meta"):
        model = Transformer(config.model)
    if mesh.size("context") > 1:
        share_sequences(model, config.parallel.context_method, mesh.tokens["context"].get_group())
    if mesh.size("tensor") > 1:
        share_matrices(model, mesh.weights["tensor"])
    if config.train.compile:
        compile_blocks(model.blocks.values(), mesh.world.device)
    shard(model, model.blocks.values(), config.parallel, mesh)
    offloads = config.parallel.offload == "parameters"
    model.to_empty(device="cpu" if offloads else mesh.world.device.torch)
    initialise(model, config)
    model.loss.z_loss, model.loss.label_smoothing = config.train.z_loss, config.train.label_smoothing
    return model.train()


def initialise(model: nn.Module, config: RunConfig) -> None:
    """Draw every parameter from (seed, its qualified name): equal for every layout."""
    for name, parameter in model.named_parameters():
        distribute(draw(name, parameter.shape, config.model, config.seed), parameter)
