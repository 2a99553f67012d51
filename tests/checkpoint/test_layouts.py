"""What is saved under one layout goes on under every other, and comes back from there with every bit of it.

Each layout's ranks are started once to save, once to go on with everything that the others saved, and once to take
back what the others made of it; every pair of layouts is compared then. The vocabulary is odd, so that no layout can
halve it.
"""

import hashlib
import json
from collections import defaultdict
from itertools import product

import pytest
import torch
from safetensors import safe_open

from parallel.reference import SAMPLES, rank_batches, run_config, whole
from polarlm.checkpoint import Checkpoints
from polarlm.config import UserError
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from ranks import run_ranks

FAMILIES = ("gpt", "llama")  # the first is tied, the second not
SHAPE = "--model.layers 4 --model.vocab-size 257"
# Ranks, samples of a microbatch, and the layout.
LAYOUTS = {
    "one process": (1, 8, ""),
    "zero 2 x2": (2, 4, "--parallel.zero-stage 2"),
    "zero 3 x4": (4, 2, "--parallel.zero-stage 3"),
    "tensor 2": (2, 8, "--parallel.tensor 2"),
    "interleaved": (2, 2, "--parallel.pipeline 2 --parallel.pipeline-schedule interleaved1f1b"),
    "zero 3 x tensor 2 x 1f1b": (8, 2, "--parallel.zero-stage 3 --parallel.tensor 2 --parallel.pipeline 2"),
    "ring": (2, 8, "--parallel.context 2"),
    "hybrid of ring and ulysses": (
        4,
        8,
        "--parallel.context 4 --parallel.context-method hybrid --parallel.context-ulysses 2",
    ),
}
PROGRESS = {"step": 2, "samples": 16, "tokens": 256}


class Trained:
    """A model under a layout, with its optimizer."""

    def __init__(self, world, family, layout):
        _, self._micro, flags = LAYOUTS[layout]
        words = f"{SHAPE} --train.micro-batch-size {self._micro} --train.global-batch-size {SAMPLES} {flags}"
        config = run_config(family, world.size, words.split())
        self.engine = Engine(config, world)
        self.optimizer = build_optimizer(self.engine.model, config.train.optimizer)
        self._world = world

    def steps(self, numbers):
        """Take these steps; their losses."""
        engine = self.engine
        batches = (rank_batches(n, engine.data_rank, engine.data_ranks, self._micro) for n in numbers)
        return [train_step(engine, self.optimizer, batch, clip=0.1).loss for batch in batches]

    def save(self, folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        Checkpoints(folder, 1, self._world).save(2, self.engine.model, self.optimizer, PROGRESS)

    def load(self, folder):
        assert Checkpoints(folder, 1, self._world).load(2, self.engine.model, self.optimizer) == PROGRESS


def _families(saved, loaded):
    """Each pair of layouts takes one of the families, by turns; a layout and itself both."""
    if saved == loaded:
        return FAMILIES
    names = list(LAYOUTS)
    return (FAMILIES[(names.index(saved) + names.index(loaded)) % 2],)


def _saved(root, family, layout):
    return root / family / layout


def _moved(root, family, saved, loaded):
    return root / family / f"{saved} -> {loaded}"


def _taken_back(root, family, saved, loaded):
    return root / family / f"{saved} -> {loaded} -> back"


def _save(world, root, layout):
    """Train two steps, save, and train two more; their losses by family."""
    losses = {}
    for family in FAMILIES:
        trained = Trained(world, family, layout)
        trained.steps([0, 1])
        trained.save(_saved(root, family, layout))
        losses[family] = trained.steps([2, 3])
    return losses


def _go_on(world, root, layout):
    """Load what each layout saved, save that again, and train two steps; their losses by family and layout."""
    losses = {}
    models = {family: Trained(world, family, layout) for family in FAMILIES}
    for saved in LAYOUTS:
        for family in _families(saved, layout):
            trained = models[family]
            trained.engine.evaluate(_evaluation())  # leaves parameters gathered, which loading must mend
            trained.load(_saved(root, family, saved))
            trained.save(_moved(root, family, saved, layout))
            losses[family, saved] = trained.steps([2, 3])
    return losses


def _take_back(world, root, layout):
    """Load what each layout made of this one's, and save that again."""
    models = {family: Trained(world, family, layout) for family in FAMILIES}
    for other in LAYOUTS:
        for family in _families(layout, other):
            models[family].load(_moved(root, family, layout, other))
            models[family].save(_taken_back(root, family, layout, other))


def _evaluation():
    batch = rank_batches(0, 0, 1, 8)[0]
    arrays = (batch.tokens[:2], batch.positions[:2], batch.positions[:2] * 0, batch.targets[:2])
    return tuple(map(torch.from_numpy, arrays))


def _each_layout(function, root):
    """What every rank of every layout gives."""
    return {layout: run_ranks(LAYOUTS[layout][0], function, root, layout, timeout=200) for layout in LAYOUTS}


def _digest(checkpoints):
    """Of everything in the checkpoint, by name: whole tensors, the optimizer's numbers, the progress."""
    folder, digests = checkpoints / "step-2", {}
    for name, tensor in _whole_tensors(folder).items():
        assert tensor.isfinite().all(), name
        digests[name] = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    state = json.loads((folder / "state.json").read_text())
    state["optimizer"]["groups"] = sorted(
        [(name, group["numbers"]) for group in state["optimizer"]["groups"] for name in group["parameters"]]
    )
    digests["state.json"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _whole_tensors(folder):
    """Put a checkpoint's tensors together from their pieces, by what the shards' headers say and nothing of PolarLM."""
    pieces = defaultdict(list)
    for path in sorted(folder.glob("*/*.safetensors")):
        with safe_open(path, "pt") as shard:
            begins = json.loads((shard.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in shard.keys():  # noqa: SIM118
                tensor = shard.get_tensor(name)
                begin = begins.get(name, {}).get("saved_offsets", [0] * tensor.ndim)
                pieces[name].append((begin, tensor))
    return {name: _joined(name, its) for name, its in pieces.items()}


def _joined(name, pieces):
    shape = [max(begin[d] + piece.shape[d] for begin, piece in pieces) for d in range(pieces[0][1].ndim)]
    whole, written = torch.zeros(shape), torch.zeros(shape, dtype=torch.int8)
    for begin, piece in pieces:
        place = tuple(slice(b, b + size) for b, size in zip(begin, piece.shape, strict=True))
        whole[place] = piece
        written[place] += 1
    assert (written == 1).all(), f"{name}: its pieces leave gaps or overlap"
    return whole


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def straight(root):
    """The losses of the undisturbed runs, by layout and family."""
    return {layout: losses[0] for layout, losses in _each_layout(_save, root).items()}


@pytest.fixture(scope="module")
def moved(root, straight):
    """The losses of every rank under a layout, by the family and the layout that it goes on from."""
    return _each_layout(_go_on, root)


def test_a_checkpoint_of_any_layout_goes_on_under_any_other(straight, moved):
    """B34 and invariant 2: to the bit on its own layout."""
    for saved, loaded in product(LAYOUTS, LAYOUTS):
        for family in _families(saved, loaded):
            expected = straight[saved][family]
            for losses in moved[loaded]:
                same = expected if saved == loaded else pytest.approx(expected, rel=1e-5)
                assert losses[family, saved] == same, (family, saved, loaded)


def test_there_and_back_changes_no_bit(root, moved):
    """B34 and invariant 3."""
    _each_layout(_take_back, root)
    for saved, loaded in product(LAYOUTS, LAYOUTS):
        for family in _families(saved, loaded):
            before = _digest(_saved(root, family, saved))
            assert {"norm.weight", "norm.weight.exp_avg", "norm.weight.exp_avg_sq", "state.json"} <= before.keys()
            assert _digest(_moved(root, family, saved, loaded)) == before, (family, saved, loaded)
            assert _digest(_taken_back(root, family, saved, loaded)) == before, (family, saved, loaded)


OTHER_MODELS = {
    "--model.layers 6": "missing: blocks.4.",
    "--model.layers 2": "not in the model: blocks.2.",
    "--model.vocab-size 258": "of another shape: embedding.tokens.weight (257×32, in the model 258×32)",
}


def _try_to_load(world, folder, flags):
    """What each of the other models is told on this rank, and whether its weights were left alone."""
    told = []
    for model in OTHER_MODELS:
        config = run_config("gpt", world.size, [*SHAPE.split(), *flags.split(), *model.split()])
        engine = Engine(config, world)
        before = [whole(parameter) for parameter in engine.model.parameters()]
        with pytest.raises(UserError) as refusal:
            Checkpoints(folder, 1, world).load(2, engine.model, build_optimizer(engine.model, config.train.optimizer))
        is_left_alone = all(map(torch.equal, before, map(whole, engine.model.parameters())))
        told.append((str(refusal.value), is_left_alone))
    return told


@pytest.mark.parametrize("layout", ["--parallel.pipeline 2", "--parallel.tensor 2", "--parallel.zero-stage 3"])
def test_another_model_is_refused_on_every_rank_by_its_names(tmp_path, layout):
    """B34."""

    def save(world):
        Trained(world, "gpt", "one process").save(tmp_path)

    run_ranks(1, save)
    first, second = run_ranks(2, _try_to_load, tmp_path, f"{layout} --train.gradient-accumulation-steps 2")
    assert first == second
    for (message, is_left_alone), names in zip(first, OTHER_MODELS.values(), strict=True):
        assert is_left_alone
        assert names in message
        assert "\n" not in message
