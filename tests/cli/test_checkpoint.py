"""`polarlm checkpoint`: what a run's checkpoints are, and what may go."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from polarlm.checkpoint import Checkpoints, load_model, saved_checkpoints, shelf
from polarlm.cli import main
from polarlm.config import dump_run, load_run
from polarlm.launch import lock
from polarlm.parallel import Device, Engine, World
from polarlm.train import build_optimizer

SHAPE = "--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 11 --train.seq-len 8 --train.steps 40"
STEPS = (10, 20, 30, 40)


@pytest.fixture
def run_folder(tmp_path):
    """A run with checkpoints at STEPS, each with other weights, and validation losses, of which step 20's is lowest."""
    world = World(0, 1, Device(torch.device("cpu")))
    config = load_run(None, environment={}, flags=[*SHAPE.split(), "--parallel.ranks", "1"]).config
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_run(config))
    engine = Engine(config, world)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    checkpoints = Checkpoints(folder / "checkpoints", 9, world)
    for step in STEPS:
        with torch.no_grad():
            engine.model.norm.weight.fill_(step)
        progress = {"step": step, "tokens": 8 * step, "loss": 2.0, "config": config.model_dump(mode="json")}
        checkpoints.save(step, engine.model, optimizer, progress)
    lines = [{"step": step, "val_loss": 3 - (step == 20)} for step in STEPS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def _flip_a_byte(folder, step):
    shard = next((folder / f"checkpoints/step-{step}/weights").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def test_the_list_says_steps_losses_and_layouts(run_folder, capsys):
    assert main(["checkpoint", "list", str(run_folder), "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in records] == list(STEPS)
    assert records[1] | {"bytes": 0} == {
        "step": 20, "tokens": 160, "bytes": 0, "loss": 2.0, "val_loss": 2, "layout": "1 rank", "fault": None,
    }  # fmt: skip
    assert main(["checkpoint", "list", str(run_folder)]) == 0
    assert "step 20" in capsys.readouterr().out


def test_verify_finds_a_flipped_byte(run_folder, capsys):
    assert main(["checkpoint", "verify", str(run_folder)]) == 0
    _flip_a_byte(run_folder, 30)
    assert main(["checkpoint", "verify", str(run_folder)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other bytes" in line]
    assert line.startswith("step 30")


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (["--keep-last", "2"], [30, 40]),
        (["--keep-every", "20"], [20, 40]),
        (["--keep-best"], [20, 40]),
        (["--keep-last", "1", "--keep-best", "--keep-every", "30"], [20, 30, 40]),
        (["--keep-last", "1", "--dry-run"], [10, 20, 30, 40]),
    ],
)
def test_prune_keeps_what_a_rule_says_and_the_newest(run_folder, rule, left):
    assert main(["checkpoint", "prune", str(run_folder), *rule]) == 0
    assert _steps(run_folder) == left


def test_prune_without_a_rule_deletes_nothing(run_folder, capsys):
    assert main(["checkpoint", "prune", str(run_folder)]) == 2
    assert "--keep-last" in capsys.readouterr().err
    assert _steps(run_folder) == list(STEPS)


def test_prune_keeps_the_newest_complete_one_below_a_broken_one(run_folder):
    (run_folder / "checkpoints/step-40/complete.json").unlink()
    assert main(["checkpoint", "prune", str(run_folder), "--keep-every", "1000"]) == 0
    assert _steps(run_folder) == [30, 40]


def test_prune_keeps_the_newest_whose_bytes_are_whole(run_folder):
    _flip_a_byte(run_folder, 40)
    assert main(["checkpoint", "prune", str(run_folder), "--keep-last", "1"]) == 0
    assert _steps(run_folder) == [30, 40]
    _flip_a_byte(run_folder, 30)
    assert main(["checkpoint", "prune", str(run_folder), "--keep-last", "1"]) == 0
    assert _steps(run_folder) == [30, 40]


def test_a_validation_loss_that_is_no_number_is_not_the_best(run_folder):
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 10, "val_loss": 3', '"step": 10, "val_loss": NaN'))
    assert main(["checkpoint", "prune", str(run_folder), "--keep-best"]) == 0
    assert _steps(run_folder) == [20, 40]


def test_prune_leaves_a_run_alone_that_trains(run_folder, capsys):
    with lock.hold(run_folder):
        assert main(["checkpoint", "prune", str(run_folder), "--keep-last", "1"]) == 2
        assert main(["checkpoint", "prune", str(run_folder), "--keep-last", "1", "--dry-run"]) == 0
    assert "trains in it" in capsys.readouterr().err
    assert _steps(run_folder) == list(STEPS)


def test_names_that_no_run_gives_are_no_checkpoints(run_folder):
    for name in ("step-007", "step-٣", "step-", "step-5x"):
        (run_folder / "checkpoints" / name).mkdir()
    assert main(["checkpoint", "prune", str(run_folder), "--keep-last", "4"]) == 0
    assert [each.step for each in saved_checkpoints(run_folder)] == list(STEPS)


@pytest.mark.parametrize("progress", [[], {}, {"config": 5}, {"config": {"parallel": {"zigzag": 3}}}])
def test_what_a_checkpoint_says_in_other_words_is_listed_as_unknown(run_folder, progress, capsys):
    (run_folder / "checkpoints/step-40/state.json").write_text(json.dumps({"progress": progress}))
    assert main(["checkpoint", "list", str(run_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["layout"] == "unknown"


@pytest.mark.parametrize("ending", ["vanishes", "breaks off"])
def test_one_that_a_run_deletes_meanwhile_is_left_out(run_folder, ending, monkeypatch):
    def fault_of(folder, with_digests):
        if folder.name == "step-20":
            shutil.rmtree(folder)
            if ending == "breaks off":
                raise FileNotFoundError(folder)
        return

    monkeypatch.setattr(shelf, "fault_of", fault_of)
    assert [each.step for each in saved_checkpoints(run_folder)] == [10, 30, 40]


def test_when_all_go_meanwhile_the_later_ones_are_shown(run_folder, monkeypatch):
    """Of a run that keeps one."""
    look, shelf_folder = shelf.fault_of, run_folder / "checkpoints"
    for step in (10, 20, 30):
        shutil.rmtree(shelf_folder / f"step-{step}")

    def look_too_late(folder, with_digests):
        if folder.name == "step-40":
            folder.rename(shelf_folder / "step-50")
        return look(folder, with_digests)

    monkeypatch.setattr(shelf, "fault_of", look_too_late)
    assert [(each.step, each.fault) for each in saved_checkpoints(run_folder)] == [(50, None)]


def test_one_that_goes_while_it_is_exported_is_one_line_and_leaves_no_file(run_folder, tmp_path, monkeypatch, capsys):
    read = shelf.read_tensors

    def read_too_late(tensors, folder, alone):
        shutil.rmtree(folder.parent)
        read(tensors, folder, alone)

    monkeypatch.setattr(shelf, "read_tensors", read_too_late)
    before = {*tmp_path.iterdir()}
    assert main(["checkpoint", "export-weights", str(run_folder), "--output", str(tmp_path / "x")]) == 2
    assert "step-40: has gone while it was read" in capsys.readouterr().err
    assert {*tmp_path.iterdir()} == before


def test_bytes_that_changed_are_not_exported(run_folder, tmp_path, capsys):
    _flip_a_byte(run_folder, 40)
    assert main(["checkpoint", "export-weights", str(run_folder), "--output", str(tmp_path / "x")]) == 2
    assert "step-40: not to be used" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_exported_weights_are_the_models_and_a_mean_is_a_mean(run_folder, tmp_path):
    file = tmp_path / "one.safetensors"
    assert main(["checkpoint", "export-weights", str(run_folder), "--output", str(file)]) == 0
    exported, model = load_file(file), load_model(run_folder)
    assert exported.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(exported[name], parameter) for name, parameter in model.named_parameters())
    assert main(["checkpoint", "export-weights", str(run_folder), "--step", "10", "40", "--output", str(file)]) == 0
    assert torch.equal(load_file(file)["norm.weight"], torch.full((16,), 25.0))


@pytest.mark.parametrize("words", [["show", "--step", "15"], ["export-weights", "--step", "15", "--output", "x"]])
def test_a_step_that_is_not_there_is_one_line_with_those_that_are(run_folder, words, capsys):
    assert main(["checkpoint", words[0], str(run_folder), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert "step 15" in error
    assert "10, 20, 30, 40" in error
    assert len(error.splitlines()) == 1


def test_show_tells_the_run_it_was_saved_in(run_folder, capsys):
    assert main(["checkpoint", "show", str(run_folder), "--step", "20"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"]["config"]["model"]["layers"] == 1
