"""bf16 parameters: what is computed with and gathered is bf16; what is added up, changed and saved is fp32."""

import pytest
import torch
from safetensors.torch import load_file

from parallel.reference import assert_close, rank_batches, run_config, whole
from parallel.test_precision import PARAMETERS, Carried
from polarlm.checkpoint import Checkpoints
from polarlm.config import UserError
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from polarlm.train.step import as_tensors
from polarlm.verify.compare import BOUNDS
from ranks import run_ranks

FULL = ["--train.recompute", "full"]
PIPELINE = ["--parallel.pipeline", "2", "--train.gradient-accumulation-steps", "4", "--train.micro-batch-size", "2"]
LAYOUTS = {  # ranks, flags, how close to one process
    **{f"zero {stage}": (2, ["--parallel.zero-stage", str(stage)]) for stage in (0, 1, 2, 3)},
    "pipeline": (2, PIPELINE),
    "offloaded": (2, ["--parallel.zero-stage", "3", "--parallel.offload", "parameters"]),
    "recomputed": (1, [*FULL, "--train.offload-activations", "host"]),
    "recomputed, zero 3": (2, [*FULL, "--parallel.zero-stage", "3"]),
}
GATHER_NOTHING = ("zero 0", "pipeline", "recomputed")


class _Types(Carried):
    """And of each tensor that is gathered."""

    def __init__(self):
        super().__init__()
        self.gathered = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if "allgather" in str(operation):
            self.gathered.add(args[1].dtype)
        return super().__torch_dispatch__(operation, types, args, kwargs)


def _step(world, family, flags):
    """Loss, gradients and the evaluation's loss; types of parameters, gradients, blocks' inputs, sums and gathers."""
    engine = Engine(run_config(family, world.size, [*flags, *PARAMETERS]), world)
    inputs = set()
    for block in engine.model.blocks.values():
        block.register_forward_pre_hook(lambda _, args: inputs.add(args[0].dtype))
    batches = [as_tensors(batch) for batch in rank_batches(0, engine.data_rank, engine.data_ranks, 2)]
    with _Types() as seen:
        loss = engine.forward_backward(batches, 100.0)
    named = dict(engine.model.named_parameters())
    kept = {tensor.dtype for parameter in named.values() for tensor in (parameter, parameter.grad)}
    (evaluated,) = engine.sum(engine.evaluate(batches[0]))
    gradients = {name: whole(parameter.grad) for name, parameter in named.items()}
    return (
        loss,
        evaluated,
        gradients,
        {"kept": kept, "inputs": inputs, "sums": set(seen.sums), "gathers": seen.gathered},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_one_process_does(layout):
    family = "gpt" if layout == "zero 3" else "llama"  # tied or not, learned positions or rotary ones
    [(loss, _, gradients, types)] = run_ranks(1, _step, family, [])
    assert types == {"kept": {torch.float32}, "inputs": {torch.bfloat16}, "sums": set(), "gathers": set()}
    ranks, flags = LAYOUTS[layout]
    for rank_loss, evaluated, rank_gradients, types in run_ranks(ranks, _step, family, flags):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert 0 < evaluated < 1e9
        assert_close(rank_gradients, gradients)
        assert (types["kept"], types["inputs"]) == ({torch.float32}, {torch.bfloat16})
        assert types["sums"] <= {torch.float32, torch.float64}
        assert types["gathers"] == (set() if layout in GATHER_NOTHING else {torch.bfloat16})


def test_a_tile_that_is_computed_again_is_cast_again():
    tiled = ["--train.tile", "5"]
    [(loss, _, gradients, _)] = run_ranks(1, _step, "llama", [])
    for ranks, flags in ((1, tiled), (2, [*tiled, "--parallel.zero-stage", "3"])):
        for rank_loss, _, rank_gradients, _ in run_ranks(ranks, _step, "llama", flags):
            assert rank_loss == pytest.approx(loss, rel=1e-4)
            for name, gradient in gradients.items():  # each tile's part of a sum is rounded
                assert (rank_gradients[name] - gradient).norm() < BOUNDS["bf16"] * gradient.norm(), name


def _train_and_save(world, folder, flags, steps, resume):
    config = run_config("llama", world.size, flags)
    engine = Engine(config, world)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    checkpoints = Checkpoints(folder, keep_last=9, world=world)
    if resume:
        checkpoints.load(resume, engine.model, optimizer)
    losses = [
        train_step(engine, optimizer, rank_batches(step, engine.data_rank, engine.data_ranks, 2), clip=1.0).loss
        for step in steps
    ]
    checkpoints.save(steps[-1] + 1, engine.model, optimizer, {})
    return losses


def test_a_run_is_resumed_with_and_without(tmp_path):
    zero3 = ["--parallel.zero-stage", "3"]
    [straight] = run_ranks(1, _train_and_save, tmp_path / "straight", [], range(6), None)
    ways = [(2, [*zero3, *PARAMETERS], 0), (1, [], 2), (1, PARAMETERS, 4)]
    for ranks, flags, first in ways:
        for losses in run_ranks(
            ranks, _train_and_save, tmp_path / "run", flags, range(first, first + 2), first or None
        ):
            assert losses == pytest.approx(straight[first : first + 2], rel=BOUNDS["bf16"])
    straight_files, files = (sorted((tmp_path / run / "step-6").rglob("*.safetensors")) for run in ("straight", "run"))
    expected, found = ({n: t for file in own for n, t in load_file(file).items()} for own in (straight_files, files))
    assert {(name, tensor.dtype) for name, tensor in found.items()} == {(name, t.dtype) for name, t in expected.items()}
    assert {tensor.dtype for tensor in found.values() if tensor.ndim} == {torch.float32}


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (1, PARAMETERS[2:], "bf16 parameters are for bf16 products, and train.precision is fp32"),
        (
            2,
            [*PARAMETERS, *PIPELINE, "--parallel.pipeline-schedule", "zbvzerobubble", "--model.layers", "4"],
            "zbvzerob",
        ),
        (1, [*PARAMETERS, *FULL, "--train.compile"], "torch's compiler takes no such cast"),
    ],
)
def test_what_it_does_not_go_with_is_named(ranks, flags, message):
    with pytest.raises(UserError, match=f"train.parameter_precision: .*{message}"):
        run_config("llama", ranks, flags)
