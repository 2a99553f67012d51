"""What a user gets wrong: one line that names the field or the file and the mend, and nothing is left behind."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from polarlm.cli import main
from polarlm.config import dump_run, load_run
from polarlm.data import load_tokenizer
from polarlm.parallel import Device, World
from polarlm.train import fit, open_run

SHAPE = "--model.layers 1 --model.hidden 16 --model.heads 2 --train.seq-len 16"
TRAIN = f"train {SHAPE} --train.steps 3"
MODEL = "model: {layers: 1, hidden: 16, heads: 2}\n"
FILES = {
    "betas.yaml": MODEL + "train:\n  steps: 3\n  optimizer: {betas: [0.9, 2.0]}\n",
    "switch.yaml": "model:\n  layers: true\n  hidden: 16\n  heads: 2\ntrain: {steps: 3}\n",
    "tab.yaml": "train:\n\tsteps: 5\n",
    "two.yaml": MODEL + "train: {steps: 3}\n---\n" + MODEL,
    "itself.yaml": MODEL + "train: &a {x: *a}\n",
    "no_run.yaml/nothing": "",
    "bad.jsonl": '{"text": "a"}\n{"text": \n',
    "empty.jsonl": "",
    "list.txt": "0.5 data/text wiki\nhalf data/text\n",
    "tok/tokenizer.json": "{}",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a dataset, a trained run, and broken ones of each kind."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        _fill()
    return place


def _fill():
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("a.jsonl").write_text('{"text": "a few words, and a few more"}\n' * 50)
    assert main("data prepare a.jsonl --tokenizer bytes --output data/text --workers 1".split()) == 0
    manifest = json.loads(Path("data/text.json").read_text())
    for name, broken in {
        "list": ["no", "mapping"],
        "tokenizer": manifest | {"tokenizer": "tok"},
        "files": manifest | {"files": {"text.bin": 5}},
        "gone": manifest | {"tokenizer": {"path": "gone"}},
    }.items():
        for ending in ("bin", "idx"):
            shutil.copy(f"data/text.{ending}", f"data/{name}.{ending}")
        Path(f"data/{name}.json").write_text(json.dumps(broken))
    Path("bad_report").mkdir()
    Path("bad_report/report").touch()
    Path("bad_report/metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    _train(Path("runs/good"))
    for name in ("no_mark", "no_tokenizer", "bad_config", "bad_metrics"):
        shutil.copytree("runs/good", f"runs/{name}", symlinks=True)
    Path("runs/no_mark/checkpoints/step-1/complete.json").unlink()
    shutil.rmtree("runs/no_tokenizer/tokenizer")
    Path("runs/bad_config/config.yaml").write_text("model: [")
    Path("runs/bad_metrics/metrics.jsonl").write_text('{"step": 1, "loss": 1}\n[1]\n{"step": 2, "loss": 1}\n')


def _train(folder):
    flags = [*SHAPE.split(), "--train.steps", "1", "--model.vocab-size", "257", "--data.tokenizer", "bytes"]
    config = load_run(None, environment={}, flags=flags).config
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_run(config))
    load_tokenizer("bytes").save(folder / "tokenizer")
    fit(open_run(folder, config, World(0, 1, Device(torch.device("cpu")))))


MISTAKES = {  # the words typed -> the beginning of what is said, and what else it holds
    "train": ["model: is missing", "polarlm init"],
    "train nothing.yaml": ["nothing.yaml: no such file", "polarlm init"],
    "train no_run.yaml": ["no_run.yaml: no config.yaml there"],
    "train a.jsonl": ["a.jsonl:2: not YAML"],
    "train data/text.bin": ["data/text.bin: "],
    "train betas.yaml": ["betas.yaml:4: train.optimizer.betas: 2.0", "less than 1"],
    "train switch.yaml": ["switch.yaml:2: model.layers: True: needs a value"],
    "train tab.yaml": ["tab.yaml:2: not YAML"],
    "train two.yaml": ["two.yaml:3: not YAML"],
    "train itself.yaml": ["itself.yaml: not YAML"],
    f"{TRAIN} --train.steps": ["--train.steps: train.steps: True: needs a value"],
    f"{TRAIN} --profile": ["--profile: log.profile: True: needs a value"],
    f"{TRAIN} --train. 5": ["--train.: not the path of a field"],
    f"{TRAIN} --.x 5": ["--.x: not the path of a field"],
    f"{TRAIN} --train.optimizer.betas 0.9 1.5": ["--train.optimizer.betas: train.optimizer.betas: 1.5"],
    f"{TRAIN} --train.optimizer.betas 0.9": ["--train.optimizer.betas: "],
    f"{TRAIN} --train.optimizer.lr 1e400": ["--train.optimizer.lr: ", "finite"],
    f"{TRAIN} --train.schedule.name wsd --train.schedule.decay-steps 4": [
        "--train.schedule.decay-steps: train.schedule.decay_steps: 4 is more than the 3 steps",
    ],
    f"{TRAIN} --parallel.pipeline-schedule zigzag": ["--parallel.pipeline-schedule: ", "zigzag", "1f1b"],
    f"{TRAIN} --parallel.ranks 2.5": ["--parallel.ranks: parallel.ranks: 2.5"],
    f"{TRAIN} --model.rope-scaling.factor 2": ["--model.rope-scaling.factor: model.rope_scaling: ", "rotary"],
    f"{TRAIN} --log.trackers csv mlflow": ["--log.trackers: ", "'mlflow'", "wandb"],
    f"{TRAIN} --data.paths data/nothing": ["data.paths: data/nothing.idx is not there"],
    f"{TRAIN} --data.paths data/list": ["data/list.json: is not a manifest"],
    f"{TRAIN} --data.paths data/tokenizer": ["data/tokenizer.json: is not a manifest"],
    f"{TRAIN} --data.paths data/files": ["data/files.json: is not a manifest"],
    f"{TRAIN} --data.paths data/gone": ["gone: no tokenizer there"],
    f"{TRAIN} --data.file-list list.txt": ["list.txt:2: 'half data/text'"],
    f"{TRAIN} --data.file-list data": ["data.file_list: data cannot be read"],
    f"{TRAIN} --data.paths data/text --data.tokenizer tok": ["tok/tokenizer.json: is not a tokenizer.json"],
    f"{TRAIN} --data.paths data/text --data.split 0 0 0": ["data.split: ", "make one of them positive"],
    f"{TRAIN} --train.init-from nowhere": ["train.init_from: nowhere: not a run folder"],
    f"{TRAIN} --train.init-from runs/no_mark": ["train.init_from: runs/no_mark: no complete checkpoint"],
    f"{TRAIN} --model.hidden 32 --train.init-from runs/good": ["train.init_from: ", "of another shape"],
    f"{TRAIN} --name {'n' * 300}": ["runs/nnn", "cannot be written", "another folder"],
    f"{TRAIN} --name latest": ["--name: name: 'latest': runs/latest points to the newest run"],
    f"{TRAIN} --train.step-timeout 1e30": ["--train.step-timeout: train.step_timeout: ", "31536000"],
    f"{TRAIN} --model.family bert": ["--model.family: model.family: 'bert'", "'gpt' or 'llama'"],
    f"{TRAIN} --model.family gpt llama": ["--model.family: "],
    f"{TRAIN} --model": ["--model: model.preset: needs a name"],
    f"{TRAIN} --model zzz": ["--model: model.preset: there is none called 'zzz'; `polarlm models` lists them"],
    "train runs/bad_config --resume": ["runs/bad_config/config.yaml:1: not YAML"],
    "data prepare bad.jsonl --tokenizer bytes --output new/deep/x": ["bad.jsonl:2: not JSON", "--bad-lines skip"],
    "data prepare empty.jsonl --tokenizer bytes --output new/x": ["empty.jsonl: no text in there"],
    "data prepare a.jsonl --tokenizer tok --output new/x": ["tok/tokenizer.json: is not a tokenizer.json"],
    "data prepare a.jsonl --tokenizer bytes --output new/x --workers 1e3": ["argument --workers: '1e3' is not a whole"],
    "data merge data/text data/list --output new/x": ["data/list.json: is not a manifest"],
    "data merge data/text data/tokenizer --output new/x": ["data/tokenizer.json: is not a manifest"],
    "data merge data/text data/nothing --output new/x": ["data.paths: data/nothing.idx is not there"],
    "data inspect data/list": ["data/list.json: is not a manifest"],
    "data inspect data/text --documents -3": ["argument --documents: '-3' is not a whole number"],
    "data compress data/text --split inf,1,1": ["--split inf,1,1: is three proportions"],
    "data prepare a.jsonl --tokenizer bytes --output .": ["argument --output: '.' has no name"],
    "data merge data/text --output ..": ["argument --output: '..' has no name"],
    f"tokenizer train a.jsonl --vocab-size {10**20} --output new": ["vocab-size: 1000", "too large"],
    "tokenizer train nothing --vocab-size 300 --output new": ["nothing: no such file or folder"],
    "tokenizer train empty.jsonl --vocab-size 300 --output new/deep": ["empty.jsonl: no text in there"],
    "tokenizer train bad.jsonl --vocab-size 300 --output new": ["bad.jsonl:2: not JSON"],
    "tokenizer train a.jsonl --vocab-size 300 --output new --text-key body": [
        "a.jsonl:1: no text under the key 'body'"
    ],
    "generate nothing": ["nothing: no such run folder"],
    "generate data": ["data: no config.yaml there"],
    "generate runs/bad_config": ["runs/bad_config/config.yaml:1: not YAML"],
    "generate runs/no_tokenizer": ["runs/no_tokenizer/tokenizer: no tokenizer there"],
    "generate runs/good --checkpoint 99": ["runs/good: no checkpoint of step 99 there; choose 1"],
    "generate runs/good --temperature nan": ["temperature: nan is not a number"],
    "report bad_report": ["bad_report/report/loss.png: cannot be written"],
    "layout data": ["data: no config.yaml there"],
    f"layout {SHAPE} --train.steps 3 --model.vocab-size 9 --png no/mesh.png": ["--png: there is no folder no"],
    "checkpoint list data": ["data: neither config.yaml nor checkpoints there"],
    "checkpoint prune data --keep-last 1": ["data: neither config.yaml nor checkpoints there"],
    "checkpoint prune runs/bad_metrics --keep-best": ["runs/bad_metrics/metrics.jsonl:2: "],
    "checkpoint export-weights runs/good --output .": ["--output: '.' is a folder"],
    "checkpoint export-weights runs/good --output no/x": ["--output: there is no folder no"],
    "checkpoint export-weights runs/good --output a.jsonl/x": ["--output: there is no folder a.jsonl"],
    "checkpoint export-weights runs/good --output runs/good/checkpoints/step-1/x.safetensors": [
        "--output: runs/good/checkpoints/step-1/x.safetensors is among the checkpoints"
    ],
    "report data": ["data: no metrics.jsonl there"],
    "report runs/bad_metrics": ["runs/bad_metrics/metrics.jsonl:2: "],
    "init no/run.yaml": ["no/run.yaml cannot be written"],
    "quickstart --train.steps x": ["--train.steps: train.steps: 'x'"],
}


def _says(words, place, capsys, monkeypatch):
    """What `polarlm WORDS` in that folder writes to standard error, once it has exited with 2 and left no trace."""
    monkeypatch.chdir(place)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    start = time.process_time()
    assert main(words.split()) == 2
    assert time.process_time() - start < 2
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(words, place, capsys, monkeypatch):
    said = _says(words, place, capsys, monkeypatch)
    beginning, *rest = MISTAKES[words]
    assert said.startswith(f"error: {beginning}")
    assert all(word in said for word in rest), said


def test_a_list_of_logs_that_cannot_be_written_leaves_no_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "logfiles").mkdir()
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(TRAIN.split()) == 2
    assert "error: logfiles: cannot be written (Is a directory)" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MASTER_PORT", "high"),
        ("MASTER_ADDR", "192.0.2.1"),
        ("OMP_NUM_THREADS", "many"),
        ("SP_TYPE", "deepspeed"),
        ("GAS", "0"),
        ("DATA_FILE_LIST", "nothing.txt"),
    ],
)
def test_a_wrong_variable_is_one_line_and_leaves_nothing(variable, value, place, capsys, monkeypatch):
    monkeypatch.setenv(variable, value)
    said = _says(TRAIN, place, capsys, monkeypatch)
    assert value in said
    assert variable in said or "data.file_list" in said


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("small: 5", "presets.yaml:1: small is a mapping"),
        ("small: {layers: 2}", "preset small: model.hidden: is missing"),
        ("small: {layers: 2, hidden: 16, heads: 3, vocab_size: 8}", "presets.yaml:1: model.heads: "),
        ("small: {preset: GPT125M, layers: 2}", "presets.yaml:1: small: a preset says its fields itself"),
        ("GPT125M: {layers: 2}", "presets.yaml:1: GPT125M is a preset of PolarLM's"),
    ],
)
def test_a_wrong_preset_of_the_users_own_is_named(preset, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "polarlm").mkdir()
    (tmp_path / "polarlm/presets.yaml").write_text(preset)
    assert words in _says("models", tmp_path, capsys, monkeypatch)
