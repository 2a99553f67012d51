"""`polarlm generate`: from a run's folder to text on the terminal."""

import pytest
import torch

from polarlm.checkpoint import Checkpoints
from polarlm.cli import main
from polarlm.config import RunConfig, dump_run
from polarlm.data import load_tokenizer
from polarlm.generate import Settings, generate
from polarlm.model import Transformer, initialise
from polarlm.parallel import Device, World

TOKENIZER = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run folder with steps 1 and 2, {step: its model})."""
    folder = tmp_path_factory.mktemp("work") / "runs" / "tiny"
    folder.mkdir(parents=True)
    shape = {"layers": 1, "hidden": 16, "heads": 2, "max_positions": 64, "init_std": 0.5}
    shape["vocab_size"] = TOKENIZER.vocab_size
    config = RunConfig.model_validate({"model": shape, "train": {"steps": 2}, "data": {"tokenizer": "bytes"}})
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=2, world=World(0, 1, Device(torch.device("cpu"))))
    models = {}
    for step in (1, 2):
        models[step] = model = Transformer(config.model).eval()
        initialise(model, config.model, seed=step)
        checkpoints.save(step, model, torch.optim.SGD(model.parameters(), lr=1.0), {})
    (folder / "config.yaml").write_text(dump_run(config))
    TOKENIZER.save(folder / "tokenizer")
    return folder, models


@pytest.mark.parametrize("words", [[], ["--checkpoint", "1"]])
def test_one_prompt_and_what_follows_it(run, words, capsys):
    folder, models = run
    asked = Settings(seed=4, temperature=0.7, top_k=50, top_p=0.9, max_tokens=12, stop=("zz", "q"))
    (expected,) = generate(models[1 if words else 2], TOKENIZER, ["hé "], asked)
    flags = ["--seed=4", "--temperature=0.7", "--top-k=50", "--top-p=0.9", "--max-tokens=12", "--stop=zz", "--stop=q"]
    assert main(["generate", str(folder), "--prompt", "hé ", *flags, *words]) == 0
    assert capsys.readouterr().out == f"hé {expected.text}\n"


def test_several_prompts_one_after_the_other(run, capsys):
    folder, models = run
    prompts = ["one", "three"]
    expected = generate(models[2], TOKENIZER, prompts, Settings(temperature=0, max_tokens=5))
    assert main(["generate", str(folder), "--prompt=one", "--prompt=three", "--temperature=0", "--max-tokens=5"]) == 0
    assert capsys.readouterr().out == f"one{expected[0].text}\n\nthree{expected[1].text}\n\n"


def test_the_newest_run_writes_freely(run, capsys, monkeypatch):
    folder, models = run
    (folder.parent / "latest").symlink_to(folder.name)
    monkeypatch.chdir(folder.parent.parent)
    assert main(["generate", "--seed=1", "--max-tokens=5"]) == 0
    (expected,) = generate(models[2], TOKENIZER, [""], Settings(seed=1, max_tokens=5))
    assert capsys.readouterr().out == f"{expected.text}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such run folder"),
        (["--temperature=-1"], "temperature: -1.0"),
        (["--temperature=nan"], "temperature: nan"),
        (["--checkpoint=7"], "no checkpoint of step 7"),
        (["--prompt", "x" * 65], "prompt: 65 tokens"),
    ],
)
def test_a_mistake_is_one_line(run, words, message, capsys):
    folder, _ = run
    words = words if words == ["nowhere"] else [str(folder), *words]
    assert main(["generate", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
