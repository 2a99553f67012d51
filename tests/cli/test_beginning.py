"""What comes before a run starts."""

from pathlib import Path

from polarlm.cli.beginning import RUNS, run_file
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
