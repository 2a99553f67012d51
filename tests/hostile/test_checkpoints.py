"""A checkpoint from a stranger: refused by its digests, or, where these were made to fit, read as what it says or not
at all."""

import hashlib
import json
import os
import random
import shutil
import struct
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from hostile.mutations import JSON_VALUES, MUTANTS, REFUSED, changed_bytes, changed_json, outcome_of
from polarlm.checkpoint import Checkpoints, load_model, load_weights
from polarlm.checkpoint.headers import read_header, read_headers
from polarlm.cli import main
from polarlm.config import UserError, dump_run, load_run
from polarlm.data import load_tokenizer
from polarlm.model import Transformer
from polarlm.parallel import Device, Engine, World
from polarlm.train import build_optimizer, fit, open_run
from polarlm.train.run import Progress

SHAPE = "--model.layers 1 --model.hidden 8 --model.heads 2 --model.vocab-size 11 --train.seq-len 4 --parallel.ranks 1"
ALONE = World(0, 1, Device(torch.device("cpu")))
STATE, MARK = "state.json", "complete.json"


def _config(*flags):
    return load_run(None, environment={}, flags=[*SHAPE.split(), *flags]).config


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of one step, to go on from."""
    folder = tmp_path_factory.mktemp("stranger") / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_run(_config("--train.steps", "1")))
    load_tokenizer("bytes").save(folder / "tokenizer")
    fit(open_run(folder, _config("--train.steps", "1"), ALONE))
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy, to be spoiled."""
    return shutil.copytree(original, tmp_path / "run", symlinks=True)


def _step(run):
    return run / "checkpoints/step-1"


def _shard(folder, part="weights"):
    (path,) = (folder / part).glob("*.safetensors")
    return path


def _seal(folder):
    """Let the mark say what is there, as who made the checkpoint can."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    record = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
              for name, content in files.items() if name != MARK}  # fmt: skip
    (folder / MARK).write_text(json.dumps({"files": record}))


def _split(shard):
    """(header, bytes of the tensors)."""
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(shard, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _resume(run):
    """(model, optimizer, progress) as a run goes on with them, and takes its next step."""
    config = _config("--train.steps", "2")
    engine = Engine(config, ALONE)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    checkpoints = Checkpoints(run / "checkpoints", 9, ALONE)
    progress = Progress.from_record(checkpoints.progress(1), 1, config, _step(run))
    checkpoints.load(1, engine.model, optimizer)
    weights = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    for parameter in engine.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return weights, progress


def _spoil(path, chance):
    content = path.read_bytes()
    if path.suffix == ".json":
        mutate = changed_json if chance.random() < 0.7 else changed_bytes
        path.write_bytes(mutate(content, chance))
        return
    if chance.random() < 0.3:
        path.write_bytes(changed_bytes(content, chance))
        return
    header, data = _split(path)
    described = header["__metadata__"]["DCP_SHARDING_INFO"]
    if chance.random() < 0.4:
        header["__metadata__"]["DCP_SHARDING_INFO"] = changed_json(described.encode(), chance).decode()
        _join(path, header, data)
    else:
        _join(path, changed_json(json.dumps(header).encode(), chance), data)


def test_mutated_checkpoints(original, run, capsys):
    chance, folder = random.Random(1), _step(run)
    weights, progress = _resume(original)
    model = Transformer(_config("--train.steps", "1").model)
    mark, refused = (folder / MARK).read_bytes(), 0
    for number in range(MUTANTS):
        victim = chance.choice([_shard(folder), _shard(folder, "optimizer"), folder / STATE, folder / MARK])
        before, is_sealed = victim.read_bytes(), number % 3 and victim.name != MARK
        _spoil(victim, chance)
        if is_sealed:
            _seal(folder)
        found = outcome_of(lambda: _resume(run), folder)
        by_name = outcome_of(lambda: load_weights(folder, model), folder)
        listed, verified, shown = (main(["checkpoint", verb, str(run)]) for verb in ("list", "verify", "show"))
        assert (listed, shown in (0, 2)) == (0, True)
        if victim.name != MARK and not is_sealed and victim.read_bytes() != before:
            assert by_name is REFUSED
            assert verified == 1
        if found is REFUSED:
            refused += 1
        else:  # what another reader of the same files finds
            stored = load_file(_shard(folder))
            assert found[0].keys() == stored.keys() == weights.keys()
            assert all(map(_same_bits, found[0].values(), (stored[name] for name in found[0])))
            assert found[1] == progress or asdict(found[1]) == _progress_said(folder)
        victim.write_bytes(before)
        (folder / MARK).write_bytes(mark)
    assert MUTANTS // 2 < refused < MUTANTS
    assert _resume(run)[1] == progress


def _same_bits(one, other):
    return one.numpy().tobytes() == other.numpy().tobytes()


def _progress_said(folder):
    progress = json.loads((folder / STATE).read_text())["progress"]
    return {key: progress.get(key, default) for key, default in asdict(Progress()).items()}


def _header(change):
    """Spoils the header of the shard of weights, by what `change` makes of its mapping and the bytes after it."""

    def spoil(folder):
        header, data = _split(_shard(folder))
        _join(_shard(folder), *change(header, data))

    return spoil


def _entry(**changes):
    """Other fields for the last tensor, a function of the old one where it is one."""

    def change(header, data):
        name, entry = max(
            ((name, entry) for name, entry in header.items() if name != "__metadata__"),
            key=lambda item: item[1]["data_offsets"],
        )
        new = {key: value(entry[key]) if callable(value) else value for key, value in changes.items()}
        return header | {name: entry | new}, data

    return _header(change)


def _pieces(change):
    """Another `DCP_SHARDING_INFO`: what `change` makes of the mapping."""

    def changed(header, data):
        info = header["__metadata__"]
        described = change(json.loads(info["DCP_SHARDING_INFO"]))
        text = described if isinstance(described, str) else json.dumps(described)
        return header | {"__metadata__": info | {"DCP_SHARDING_INFO": text}}, data

    return _header(changed)


def _begins(offsets):
    return _pieces(
        lambda pieces: {name: {"saved_offsets": offsets(piece["saved_offsets"])} for name, piece in pieces.items()}
    )


def _state(**changes):
    def spoil(folder):
        state = json.loads((folder / STATE).read_text())
        (folder / STATE).write_text(json.dumps(state | changes))

    return spoil


def _progress(**changes):
    def spoil(folder):
        state = json.loads((folder / STATE).read_text())
        (folder / STATE).write_text(json.dumps(state | {"progress": state["progress"] | changes}))

    return spoil


def _scalars(change, leaves_out=False):
    """Another count of steps for each parameter: what `change` makes of it."""

    def spoil(folder):
        state = json.loads((folder / STATE).read_text())
        scalars = state["optimizer"]["scalars"]
        state["optimizer"]["scalars"] = {
            name: {key: change(value) for key, value in numbers.items() if not leaves_out}
            for name, numbers in scalars.items()
        }
        (folder / STATE).write_text(json.dumps(state))

    return spoil


def _raw_step(text):
    def spoil(folder):
        path = folder / STATE
        path.write_text(path.read_text().replace('"step": 1,', f'"step": {text},', 1))

    return spoil


def _length_of(length):
    return lambda folder: _shard(folder).write_bytes(struct.pack("<Q", length) + _shard(folder).read_bytes()[8:])


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


def _moment_out(folder):
    shard = _shard(folder, "optimizer")
    header, _ = _split(shard)
    tensors = load_file(shard)
    save_file(
        {name: each for name, each in tensors.items() if not name.endswith("exp_avg_sq")}, shard, header["__metadata__"]
    )


def _moment_of_another_shape(folder):
    shard = _shard(folder, "optimizer")
    save_file({name: each.flatten() for name, each in load_file(shard).items()}, shard)


SEALED = {  # how its maker can spoil a checkpoint -> what is said
    "a header of terabytes": (_length_of(2**42), "promises 4398046511104 bytes of header"),
    "a header of more than 63 bits": (_length_of(2**64 - 1), "promises 18446744073709551615 bytes of header"),
    "a header beyond its file": (_length_of(10**5), "promises 100000 bytes of header"),
    "no header": (lambda folder: _shard(folder).write_bytes(b""), "bytes of header, in a file of 0"),
    "half a length": (lambda folder: _shard(folder).write_bytes(b"\0\0\0"), "bytes of header, in a file of 3"),
    "a header that is a list": (_header(lambda header, data: ([1], data)), "of another kind"),
    "a nested header": (_header(lambda header, data: (b"[" * 10**6, data)), "nested too deep"),
    "a header of no UTF-8": (_header(lambda header, data: (b'{"\xff": 1}', data)), "can't decode"),
    "a name given twice": (_header(lambda header, data: (b'{"a": 1, "a": 2}', data)), "'a' is given twice"),
    "a tensor of another length": (_entry(data_offsets=lambda at: [at[0], at[1] + 4]), "and is said to have"),
    "a tensor beyond the file": (_entry(data_offsets=lambda at: [at[0] + 10**9, at[1] + 10**9]), "one after the other"),
    "tensors that overlap": (_entry(data_offsets=lambda at: [at[0] - 4, at[1] - 4]), "one after the other"),
    "a negative offset": (_entry(data_offsets=[-32, 0]), "of another kind"),
    "an offset of a fraction": (_entry(data_offsets=[0.0, 32.0]), "of another kind"),
    "a huge shape": (_entry(shape=[2**40]), "and is said to have"),
    "a shape whose product is beyond 64 bits": (_entry(shape=[2**61]), "and is said to have"),
    "a negative shape": (_entry(shape=[-4, -2]), "of another kind"),
    "a shape that is no list": (_entry(shape="8"), "of another kind"),
    "a thousand dims": (_entry(shape=lambda shape: [*shape, *[1] * 1000]), "has 100"),
    "another type of the same width": (_entry(dtype="I32"), "of whole numbers"),
    "an unknown type": (_entry(dtype="C64"), "of a type that no checkpoint holds"),
    "a type that is none": (_entry(dtype=["F32"]), "of another kind"),
    "bytes that belong to no tensor": (_header(lambda header, data: (header, data + b"    ")), "one after the other"),
    "bytes that lack": (_header(lambda header, data: (header, data[:-4])), "one after the other"),
    "pieces that are no JSON": (_pieces(lambda pieces: "{"), "header is damaged"),
    "pieces that are a list": (_pieces(lambda pieces: []), "of another kind"),
    "pieces of no tensor": (_pieces(lambda pieces: {}), "something is missing there"),
    "a piece that begins beyond the tensor": (_begins(lambda at: [each + 1 for each in at]), "leave a gap"),
    "a piece that begins before the tensor": (_begins(lambda at: [-1 for _ in at]), "of another kind"),
    "a piece that begins at the end of the world": (_begins(lambda at: [2**61 for _ in at]), "leave a gap"),
    "a piece of other dims": (_begins(lambda at: [*at, 0]), "begins at an index of"),
    "a shard twice": (lambda folder: shutil.copy(_shard(folder), folder / "weights/b.safetensors"), "overlap"),
    "a shard that is a folder": (lambda folder: (folder / "weights/b.safetensors").mkdir(), "is no regular file"),
    "a pipe for a shard": (lambda folder: os.mkfifo(folder / "weights/b.safetensors"), "is no regular file"),
    "a pipe for the state": (lambda folder: _fifo(folder / STATE), "says nothing of state.json"),
    "no second moments": (_moment_out, "another optimizer"),
    "moments of other shapes": (_moment_of_another_shape, "another optimizer"),
    "a count that is no tensor": (_scalars(lambda number: 1.0), "another optimizer"),
    "a count of another type": (_scalars(lambda number: number | {"dtype": "int8"}), "another optimizer"),
    "a count of an unknown type": (_scalars(lambda number: number | {"dtype": "manual_seed"}), "`optimizer.scalars."),
    "a count below 0": (_scalars(lambda number: number | {"number": -5.0}), "`optimizer.scalars."),
    "no count": (_scalars(lambda number: None, leaves_out=True), "another optimizer"),
    "a state that is a list": (lambda folder: (folder / STATE).write_text("[]"), "is not what a checkpoint says"),
    "a state of nothing": (lambda folder: (folder / STATE).write_text(""), "is not what a checkpoint says"),
    "a nested state": (lambda folder: (folder / STATE).write_text("[" * 10**6), "nested too deep"),
    "a state of gigabytes": (lambda folder: os.truncate(folder / STATE, 2**24 + 1), "is larger than the 16777216"),
    "the format of a later version": (_state(format=10**6), "written by a later PolarLM"),
    "a format that is none": (_state(format="1"), "`format` should be a valid integer"),
    "progress that is a list": (_state(progress=[1]), "`progress` should be a valid dict"),
    "an optimizer that is a list": (_state(optimizer=[]), "`optimizer` should be"),
    "groups that are a mapping": (_state(optimizer={"scalars": {}, "groups": {}}), "`optimizer.groups` should be"),
    "parameters of no group": (_state(optimizer={"scalars": {}, "groups": []}), "other parameters were trained"),
    "a step of 1e300": (_raw_step("1e300"), "step: Input should be a valid integer"),
    "a step of infinity": (_raw_step("1e999"), "1e999 is not a finite number"),
    "a step that is not a number": (_raw_step("NaN"), "NaN is not a finite number"),
    "a step of a hundred digits": (_raw_step("9" * 100), "is beyond 64 bits"),
    "another step than its folder's": (_raw_step("2"), "says step 2"),
    "samples that lie": (_progress(samples=5, tokens=20), "says step 1, 5 samples" ),
    "a loss that is a text": (_progress(loss="low"), "loss: Input should be a valid number"),
    "data that is a list": (_progress(data=[]), "data: Input should be a valid dictionary"),
    "a run that is a list": (_progress(config=[]), "config: Input should be a valid dictionary"),
    "a run that is none": (_progress(config={"model": 5}), "is damaged (model: "),
}  # fmt: skip


@pytest.mark.parametrize("kind", SEALED)
def test_what_its_maker_can_do_to_a_checkpoint(kind, run):
    spoil, said = SEALED[kind]
    folder = _step(run)
    spoil(folder)
    _seal(folder)
    with pytest.raises(UserError) as refusal:
        _resume(run)
    assert outcome_of(lambda: _resume(run), folder) is REFUSED
    assert said in str(refusal.value)


MARKS = [*JSON_VALUES, *(f'{{"files": {value}}}' for value in JSON_VALUES), '{"files": {"../../x": 5}}',
         '{"files": {"../x": {"bytes": 1, "sha256": "0"}}}', '{"files": {"/etc/passwd": {"bytes": 1, "sha256": "0"}}}',
         '{"files": {"state.json": {"bytes": true, "sha256": 5}}}', '{"files": {"a\\nb": {"bytes": 1, "sha256": "0"}}}',
         '{"files": {"state.json": {"bytes": 1e300, "sha256": "0"}}}']  # fmt: skip


def test_a_mark_of_any_kind_is_a_checkpoint_not_to_be_trusted(run, capsys):
    for text in MARKS:
        (_step(run) / MARK).write_text(text)
        assert outcome_of(lambda: load_weights(_step(run), torch.nn.Linear(1, 1)), _step(run)) is REFUSED
        assert main(["checkpoint", "verify", str(run)]) == 1
        assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("below", ["weights", "weights/shard", STATE, MARK, "note"])
def test_a_link_out_of_a_checkpoint_is_refused(below, run, tmp_path):
    inside = _shard(_step(run)) if below == "weights/shard" else _step(run) / below
    outside = tmp_path / "secret"
    inside.rename(outside) if inside.exists() else outside.touch()
    inside.symlink_to(outside)
    for path in (_step(run), run):
        with pytest.raises(UserError):
            load_weights(path, Transformer(_config("--train.steps", "1").model))
    with pytest.raises(UserError, match="is a link that leads outside"):
        _resume(run)


def test_a_checkpoint_that_is_a_link_is_none(run, tmp_path, capsys):
    _step(run).rename(tmp_path / "elsewhere")
    _step(run).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no complete checkpoint there"):
        load_weights(run, torch.nn.Linear(1, 1))
    assert main(["checkpoint", "list", str(run)]) == 0
    assert "no checkpoints" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["rope_base: 20000.0", "norm_eps: 0.001"])
def test_weights_are_not_used_as_another_model(change, run):
    path, name = run / "config.yaml", change.partition(":")[0]
    lines = [f"  {change}" if line.strip().startswith(name) else line for line in path.read_text().splitlines()]
    assert load_model(run) is not None
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"config\.yaml: `model` is another than .*step-1 was trained as"):
        load_model(run)


def test_a_run_does_not_go_on_with_another_seed_than_its_checkpoint_has(run):
    with pytest.raises(UserError, match="seed: 1234 in the run, 7 now"):
        open_run(run, _config("--train.steps", "2", "--seed", "7"), ALONE)


def _shards(folder, boxes, shape=(4, 6)):
    """One shard a box of [begin, end), of a tensor that counts its elements."""
    whole = torch.arange(24.0).reshape(shape)
    folder.mkdir()
    for number, (rows, columns) in enumerate(boxes):
        begins = json.dumps({"w": {"saved_offsets": [rows[0], columns[0]]}})
        piece = whole[slice(*rows), slice(*columns)].contiguous()
        save_file({"w": piece}, folder / f"{number}.safetensors", {"DCP_SHARDING_INFO": begins})
    return folder


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 4), (0, 6))],
        [((0, 1), (0, 6)), ((1, 4), (0, 6))],
        [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6))],
        [((0, 1), (0, 4)), ((0, 3), (4, 6)), ((1, 4), (0, 2)), ((1, 3), (2, 4)), ((3, 4), (2, 6))],  # a pinwheel
    ],
)
def test_pieces_that_make_the_tensor(boxes, tmp_path):
    assert len(read_headers(_shards(tmp_path / "whole", boxes))["w"]) == len(boxes)
    spoiled = [boxes[:number] + boxes[number + 1 :] for number in range(len(boxes) - 1)]
    spoiled += [[*boxes, boxes[number]] for number in range(len(boxes))]
    for number, those in enumerate(spoiled):
        with pytest.raises(UserError, match="the pieces of w overlap, or leave a gap"):
            read_headers(_shards(tmp_path / str(number), those))


@pytest.mark.parametrize("name", ["a\n\x1b[2J", "x" * 10**5])
def test_a_name_is_quoted_in_one_short_line(name, run):
    folder = _step(run)
    header, data = _split(_shard(folder))
    first = min((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"])
    header[name] = header.pop(first)
    header["__metadata__"] = {}
    _join(_shard(folder), header, data)
    _seal(folder)
    assert outcome_of(lambda: load_weights(folder, Transformer(_config("--train.steps", "1").model)), folder) is REFUSED


def test_headers_are_those_of_the_library(original):
    tensors = load_file(_shard(_step(original)))
    pieces = read_header(_shard(_step(original)))
    assert {name: (piece.dtype, piece.shape) for name, piece in pieces.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
