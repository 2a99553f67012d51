"""`train.offload_activations: host`: inputs of blocks leave their device, come back in time, and use buffers again.

That gradients are the same to the bit is in test_recompute.py.
"""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.reference import rank_batches, run_config
from polarlm.config import UserError
from polarlm.parallel import Device, Engine, World
from polarlm.parallel.host_memory import HostMemory
from polarlm.train.step import as_tensors
from ranks import run_ranks

FULL = ["--train.recompute", "full", "--model.layers", "4"]
HOST = [*FULL, "--train.offload-activations", "host"]
PIPELINE = ["--parallel.pipeline", "2", "--train.micro-batch-size", "2", "--train.gradient-accumulation-steps", "4"]


def _engine(flags, device=None):
    return Engine(run_config("llama", 1, flags), World(0, 1, device or Device(torch.device("cpu"))))


def _batches(engine, micro=2):
    return [as_tensors(batch) for batch in rank_batches(0, engine.data_rank, engine.data_ranks, micro, True)]


@pytest.mark.parametrize(("flags", "alive"), [(FULL, [0, 1, 2, 3]), (HOST, [3])])
def test_only_the_last_blocks_input_stays_on_its_device(flags, alive):
    engine = _engine(flags)
    inputs = []
    for block in engine.model.blocks.values():
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    loss = engine.loss(_batches(engine)[0])
    assert loss.requires_grad
    assert [number for number, storage in enumerate(inputs) if storage() is not None] == alive


class Watched:
    """Every tensor that is kept: its block, and the place of its buffer."""

    def __init__(self, monkeypatch):
        self.kept = []
        keep = HostMemory.keep

        def watched(memory, tensor, number):
            kept = keep(memory, tensor, number)
            self.kept.append((number, kept.buffer.data_ptr()))
            return kept

        monkeypatch.setattr(HostMemory, "keep", watched)

    def take(self):
        """Blocks and places since this was last asked."""
        blocks, places = zip(*self.kept, strict=True) if self.kept else ((), ())
        self.kept.clear()
        return list(blocks), set(places)


def test_buffers_are_used_again_and_evaluation_takes_none(monkeypatch):
    watched = Watched(monkeypatch)
    engine = _engine(HOST)
    batches = _batches(engine)
    seen = []
    for _ in range(2):
        engine.forward_backward(batches, 100.0)
        seen.append(watched.take())
    (blocks, places), (_, later) = seen
    assert blocks == [0, 1, 2, 3] * len(batches)
    assert places == later
    assert len(places) == 4
    engine.evaluate(batches[0])
    assert watched.take() == ([], set())


def _places(world, schedule):
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = Watched(monkeypatch)
        flags = [*HOST, *PIPELINE, "--parallel.pipeline-schedule", schedule]
        engine = Engine(run_config("llama", world.size, flags), world)
        seen = []
        for _ in range(2):
            engine.forward_backward(_batches(engine), 100.0)
            seen.append(watched.take())
        return seen


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", [4, 4]), ("1f1b", [2, 1])])
def test_a_pipeline_has_a_buffer_for_each_microbatch_in_flight(schedule, in_flight):
    own = [[0, 1], [3]]  # of the second stage's first block, torch's stage holds the input
    for stage, [(blocks, places), (_, later)] in enumerate(run_ranks(2, _places, schedule)):
        assert blocks == own[stage] * 4
        assert places == later
        assert len(places) == len(own[stage]) * in_flight[stage]


class _Late:
    """Streams of a device that does each copy as late as it may: when somebody waits for it.

    It holds no tensor itself, so one that is let go before its copy was waited for is seen to be gone.
    """

    def __init__(self):
        self.pending, self.done, self.waits_for_compute = [], 0, False
        self._stream = self.Stream()

    def Stream(self):
        return SimpleNamespace(
            wait_stream=self._wait_stream,
            wait_event=self._wait_event,
            record_event=lambda: self.done + len(self.pending),
        )

    def current_stream(self):
        return self._stream

    @contextmanager
    def stream(self, stream):
        assert self.waits_for_compute, "a copy that does not wait for what it reads"
        with _Delayed(self.pending):
            yield
        self.waits_for_compute = False

    def _wait_stream(self, other):
        self.waits_for_compute = True

    def _wait_event(self, event):
        while self.done < event:
            target, source = (reference() for reference in self.pending.pop(0))
            assert target is not None, "was freed before it was written"
            assert source is not None, "was freed before it was read"
            torch.empty(0).set_(target).copy_(torch.empty(0).set_(source))
            self.done += 1


class _Delayed(TorchDispatchMode):
    def __init__(self, pending):
        super().__init__()
        self._pending = pending

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation == torch.ops.aten.copy_.default
        target, source = args[:2]
        self._pending.append((weakref.ref(target.untyped_storage()), weakref.ref(source.untyped_storage())))
        return target


class _LateDevice(Device):
    @property
    def streams(self):
        return LATE


LATE = _Late()


def test_nothing_is_read_or_freed_before_its_copy_is_done():
    gradients = []
    for flags, device in ((FULL, None), (HOST, _LateDevice(torch.device("cpu")))):
        engine = _engine(flags, device)
        for _ in range(2):
            engine.loss(_batches(engine)[0])  # of which no backward pass comes
            engine.forward_backward(_batches(engine), 100.0)
        gradients.append({name: parameter.grad for name, parameter in engine.model.named_parameters()})
    plain, late = gradients
    assert LATE.done > 2 * 4 * 4  # microbatches of two steps, blocks
    assert all(torch.equal(late[name], plain[name]) for name in plain)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_without_full_recomputation_there_is_nothing_to_keep(mode):
    with pytest.raises(UserError, match=r"train\.offload_activations: host is for what train\.recompute full keeps"):
        run_config("llama", 1, ["--train.offload-activations", "host", "--train.recompute", mode])
