"""What comes before a run starts."""

from pathlib import Path

import pytest

from polarlm.cli.beginning import RUNS, complete, run_file
from polarlm.config import UserError, load_run
from polarlm.launch import run_folder


def test_the_newest_runs_link_stands_for_the_run_it_points_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run_folder.create(RUNS, "demo")
    (folder / "config.yaml").touch()
    run_folder.announce(folder)
    file, given = run_file(RUNS / "latest")
    assert (file, given) == (Path("runs/demo/config.yaml"), Path("runs/demo"))
    run_folder.announce(given)  # as when the run goes on
    assert (RUNS / "latest").readlink() == Path("demo")


def test_a_folder_is_kept_as_it_was_named_and_a_file_has_none(tmp_path):
    (tmp_path / "config.yaml").touch()
    assert run_file(tmp_path) == (tmp_path / "config.yaml", tmp_path)
    assert run_file(tmp_path / "config.yaml") == (tmp_path / "config.yaml", None)
    assert run_file(None) == (None, None)


def test_a_prompt_that_does_not_fit_is_refused_before_a_step_is_taken():
    shape = "--model.layers 1 --model.hidden 16 --model.heads 2 --train.seq-len 16 --train.steps 1 --log.samples"

    def completed(*prompts):
        return complete(load_run(None, environment={}, flags=[*shape.split(), *prompts]).config)

    assert completed("sixteen letters.", "short").log.samples == ["sixteen letters.", "short"]
    with pytest.raises(UserError, match=r"^log\.samples: prompt: 17 tokens do not fit .* of 16 .* shorten it$"):
        completed("short", "seventeen letters")
