"""`polarlm init`: the file it writes is one that loads, and it overwrites nothing."""

import yaml

from polarlm import cli
from polarlm.config import field_paths, load_run
from polarlm.config.run import RunConfig


def test_the_file_loads_and_says_what_it_comes_to(tmp_path):
    path = tmp_path / "mine.yaml"
    assert cli.main(["init", str(path)]) == 0
    loaded = load_run(path, environment={}, devices=2)
    assert loaded.notes == []
    assert loaded.config.name == "demo"
    assert loaded.config.parallel.ranks == 2
    assert loaded.config.train.optimizer.lr == 1e-3


def test_the_lines_that_are_commented_out_are_fields_too(tmp_path):
    path = tmp_path / "run.yaml"
    cli.main(["init", str(path)])
    section, known = "", field_paths(RunConfig)
    for line in path.read_text().splitlines():
        if line and not line.startswith((" ", "#")):
            section = line.partition(":")[0]
        if line.startswith("  # ") and (commented := line.removeprefix("  # ")).partition(":")[0].isidentifier():
            value = yaml.safe_load(commented)
            assert isinstance(value, dict), line
            assert {f"{section}.{key}" for key in value} <= set(known), line


def test_a_file_that_is_there_stays_unless_forced(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    assert cli.main(["init", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert cli.main(["init", str(path), "--force"]) == 0
    assert "layers" in path.read_text()


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    assert cli.main(["init", str(tmp_path / "none" / "run.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
