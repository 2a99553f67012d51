"""From a model's shape to this rank's part of it, ready to train: the one place where parallelism meets the model."""

import torch
from torch import nn

from polarlm.config import RunConfig, Stage, pipeline_stages
from polarlm.model import RMSNorm, Transformer, draw
from polarlm.parallel.cast import cast_parameters
from polarlm.parallel.compile import compile_blocks
from polarlm.parallel.context import share_sequences
from polarlm.parallel.host_memory import keep_inputs_on_host
from polarlm.parallel.kernels import PRODUCT_TYPES
from polarlm.parallel.mesh import Mesh
from polarlm.parallel.pipeline import cut
from polarlm.parallel.recompute import recompute
from polarlm.parallel.shard import distribute, is_shared_out, shard
from polarlm.parallel.tensor import share_matrices
from polarlm.parallel.tiles import tile_feed_forward


def build_stages(config: RunConfig, mesh: Mesh) -> dict[int, Transformer]:
    """The run's pipeline stages on this rank's device, by number, with initial weights; without a pipeline the model.

    Each is laid out on the meta device first, so that no rank ever holds more than its part and one whole parameter.
    """
    own = [stage for stage in pipeline_stages(config) if stage.rank == mesh.rank("pipeline")]
    return {stage.number: _build(config, stage, mesh) for stage in own}


def _build(config: RunConfig, stage: Stage, mesh: Mesh) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config.model)
    cut(model, stage)
    for norm in filter(lambda module: isinstance(module, RMSNorm), model.modules()):
        norm.is_fused = config.train.fused_norms
    ring, ulysses = (mesh.group(axis) if mesh.size(axis) > 1 else None for axis in ("ring", "ulysses"))
    share_sequences(model, ring, ulysses, is_plain=config.train.attention == "math")
    if mesh.size("tensor") > 1:
        share_matrices(model, mesh.weights["tensor"])
    computed_in = PRODUCT_TYPES[config.train.parameter_precision]
    if not is_shared_out(config.parallel) and computed_in != torch.float32:
        cast_parameters(model, computed_in)
    if config.train.tile:
        tile_feed_forward(model.blocks.values(), config.train.tile)
        mesh.world.device.return_freed_memory()  # whoever takes tiles would hold less, though that takes longer
    recompute(model.blocks, config.train)
    if config.train.compile:
        compile_blocks(model.blocks.values(), mesh.world.device)
    if config.train.offload_activations == "host":
        # Torch's pipeline stage itself holds on to what it was sent, the input of its first block.
        first = None if stage.is_first else str(stage.layers[0])
        own = {number: block for number, block in model.blocks.items() if number != first}
        keep_inputs_on_host(own, config.train, mesh.world.device)
    parts = [*model.blocks.values()]
    if model.embedding is not None and not (config.model.tied_embeddings and model.head is not None):
        parts.append(model.embedding)  # of a large vocabulary it is larger than a block, and so is the head
    if is_shared_out(config.parallel):
        shard(model, parts, config.parallel, mesh, computed_in)
    offloads = config.parallel.offload == "parameters"
    model.to_empty(device="cpu" if offloads else mesh.world.device.torch)
    initialise(model, config)
    model.loss.z_loss, model.loss.label_smoothing = config.train.z_loss, config.train.label_smoothing
    if config.train.precision != "fp32":  # the parameters' own type
        products = PRODUCT_TYPES[config.train.precision]
        model.forward = torch.autocast(mesh.world.device.torch.type, products)(model.forward)
    return model.train()


def initialise(model: nn.Module, config: RunConfig) -> None:
    """Draw every parameter from (seed, its qualified name): equal for every layout."""
    for name, parameter in model.named_parameters():
        distribute(draw(name, parameter.shape, config.model, config.seed), parameter)
