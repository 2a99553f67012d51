"""`train.deterministic`: two runs of one layout are equal to the bit, and what cannot be so is refused by name."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from polarlm.config import UserError, load_run
from polarlm.parallel import Device
from polarlm.parallel.compile import compile_blocks
from polarlm.parallel.determinism import be_deterministic, naming_nondeterminism
from polarlm.train import fit
from ranks import run_ranks
from train.trained import open_in

SHAPE = "--model.family llama --model.layers 2 --model.hidden 32 --model.heads 4 --model.kv-heads 2"
TRAIN = "--train.seq-len 16 --train.steps 4 --train.global-batch-size 4 --train.eval-every 2 --train.eval-samples 4"
DATA = "--model.vocab-size 257 --data.tokenizer bytes"
STEPS = 4
GPU = Device(torch.device("cuda"))
MEASURED = "_s _per_sec _per_device mfu peak_memory_bytes".split()  # of the machine, and not of the work
LAYOUTS = {
    "alone": "--model.dropout 0.1",
    "zero 3": "--parallel.zero-stage 3 --model.dropout 0.1",
    "tensor": "--parallel.tensor 2 --train.micro-batch-size 2",
    "1f1b": "--parallel.pipeline 2",
    "ring": "--parallel.context 2 --train.micro-batch-size 2",
}


def _run(world, folder, *flags):
    ranks = ["--parallel.ranks", str(world.size), "--train.deterministic"]
    config = load_run(None, environment={}, flags=[*f"{SHAPE} {TRAIN} {DATA}".split(), *ranks, *flags]).config
    return open_in(world, folder, config)


def _train_twice(world, folder, flags):
    for name in ("one", "two"):
        fit(_run(world, folder / name, *flags))
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark


def _metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.endswith(tuple(MEASURED))} for line in lines]


def _saved(folder):
    tensors = {}
    for file in sorted((folder / "checkpoints" / f"step-{STEPS}").rglob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_are_equal_to_the_bit(tmp_path, layout, capfd):
    switches = run_ranks(1 if layout == "alone" else 2, _train_twice, tmp_path, LAYOUTS[layout].split())
    assert set(switches) == {(True, False)}
    one, two = (_metrics(tmp_path / name) for name in ("one", "two"))
    assert one == two
    assert [line["step"] for line in one] == list(range(1, STEPS + 1))
    assert len({line["loss"] for line in one}) == STEPS
    assert "val_loss" in one[1]
    saved, again = (_saved(tmp_path / name) for name in ("one", "two"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    assert any(name.endswith(".exp_avg") for name in saved)
    assert json.loads((tmp_path / "one/environment.json").read_text())["deterministic"] == {}
    said = capfd.readouterr().out
    assert said.count("deterministic: another run of this layout will be equal to the bit") == 2
    assert said.count(f"attention: {'math' if 'dropout' in LAYOUTS[layout] else 'flash'} (cpu)") == 2


def _put(*_):
    """An operation that has no deterministic implementation, even on a CPU."""
    torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))


def _refuse(world, folder):
    run = _run(world, folder)
    run.engine.model.blocks["1"].register_forward_hook(_put)
    with pytest.raises(UserError) as refused:
        fit(run)
    return str(refused.value)


def _refuse_in_schedule(world):
    be_deterministic(world.device)
    with pytest.raises(UserError) as refused:
        naming_nondeterminism()(_schedule)()
    return str(refused.value)


def _schedule():
    """As torch's pipeline schedules, which raise an error of their own from a stage's."""
    try:
        _put()
    except RuntimeError as error:
        raise RuntimeError("failed to run forward") from error


def test_an_operation_that_cannot_is_named_in_one_line(tmp_path):
    lines = run_ranks(1, _refuse, tmp_path / "run") + run_ranks(1, _refuse_in_schedule)
    assert (
        lines
        == ["train.deterministic: put_ has no deterministic implementation here; use train.deterministic false"] * 2
    )


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="of another kind"), naming_nondeterminism():
        raise RuntimeError("of another kind")


def _told(device, **variables):
    os.environ |= variables
    be_deterministic(device)
    return {name: os.environ[name] for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")}


def test_the_devices_libraries_are_told_what_the_user_did_not():
    [told] = run_ranks(1, lambda world: _told(GPU))
    assert told == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    own = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree"}
    assert run_ranks(1, lambda world: _told(GPU, **own)) == [own]


class _Block:
    def compile(self, options):
        self.options = options


def _compile(world):
    block = _Block()
    be_deterministic(GPU)
    compile_blocks([block], GPU)
    return block.options["deterministic"]


def test_the_compiler_times_no_kernels():
    assert run_ranks(1, _compile) == [True]


def test_a_workspace_that_lets_results_differ_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match="CUBLAS_WORKSPACE_CONFIG=:0:0 in the environment"):
        be_deterministic(GPU)
    assert not torch.are_deterministic_algorithms_enabled()
