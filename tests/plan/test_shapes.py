"""Parameters by arithmetic against those of the model itself, whole and shared out."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from polarlm.config import ParallelConfig, load_run
from polarlm.model import Transformer
from polarlm.parallel import Mesh
from polarlm.parallel.tensor import share_matrices
from polarlm.plan.shapes import block_parameters, embedding_parameters, head_parameters
from ranks import run_ranks

SHAPE = "--model.layers 1 --model.hidden 32 --model.heads 4 --model.vocab-size 64 --train.steps 1 --train.seq-len 16"
MODELS = [
    "--model.family gpt",
    "--model.family gpt --model.qk-norm true",
    "--model.family llama --model.kv-heads 2",
    "--model.family llama --model.qkv-bias true --model.ffn 48",
]


def _config(model, *flags):
    return load_run(None, environment={}, flags=[*SHAPE.split(), *model.split(), *flags]).config


def _parameters(model, tensor=1):
    block = {f"blocks.0.{name}": parameter for name, parameter in block_parameters(model, tensor).items()}
    parameters = embedding_parameters(model) | block | head_parameters(model)
    if model.tied_embeddings:
        del parameters["head.weight"]
    return parameters


@pytest.mark.parametrize("words", MODELS)
def test_names_order_and_sizes_are_the_models(words):
    model = _config(words).model
    with torch.device("meta"):
        real = {name: parameter.numel() for name, parameter in Transformer(model).named_parameters()}
    assert {name: parameter.size for name, parameter in _parameters(model).items()} == real


def _held(world, words):
    config = _config(words, "--parallel.ranks", str(world.size), "--parallel.tensor", str(world.size))
    with torch.device("meta"):
        model = Transformer(config.model)
    share_matrices(model, Mesh(ParallelConfig(ranks=world.size, tensor=world.size), world).weights["tensor"])
    return {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize(("words", "ranks"), [*((words, 2) for words in MODELS), (MODELS[2], 4)])
def test_what_tensor_ranks_hold_is_what_they_really_hold(words, ranks):
    expected = {name: p.held(ranks) for name, p in _parameters(_config(words).model, ranks).items()}
    for held in run_ranks(ranks, _held, words):
        assert held == expected
