"""`polarlm layout`, and the table that training begins with."""

import subprocess
import sys

from polarlm import cli

MODEL = ["--model.layers", "4", "--model.hidden", "32", "--model.heads", "4", "--train.seq-len", "16"]
SPREAD = ["--parallel.pipeline", "2", "--parallel.tensor", "2"]


def test_a_table_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "mesh.png"
    assert cli.main(["layout", "--ranks", "8", "--png", str(picture), *MODEL, *SPREAD]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ranks 8 = pipeline 2 x data 2 x tensor 2; ")
    assert lines[1].split() == ["rank", "layers", "samples", "matrices"]
    assert len(lines) == 2 + 8 + 1
    assert lines[-1] == f"drawn: {picture}"
    assert picture.stat().st_size > 5000


def test_it_needs_no_torch_and_no_matplotlib():
    code = (
        f"import sys; from polarlm.cli import main; code = main({['layout', '--ranks', '4', *MODEL]!r});"
        "print(code, *({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0"


def test_what_cannot_be_is_one_line(tmp_path, capsys):
    assert cli.main(["layout", "--ranks", "6", *MODEL, *SPREAD]) == 2
    assert capsys.readouterr().err.startswith("error: --parallel.ranks: parallel.ranks: 6 is not a multiple of")
    assert cli.main(["layout", "--ranks", "8", "--png", str(tmp_path / "no" / "x.png"), *MODEL]) == 2
    assert capsys.readouterr().err.startswith("error: --png: there is no folder")


def test_training_on_several_ranks_begins_with_the_table(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--name", "x", *MODEL, "--train.steps", "1", "--train.global-batch-size", "4"]
    assert cli.main([*words, "--parallel.ranks", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].startswith("ranks 2 = data 2; ")
    assert lines[2:5] == ["rank  samples", "0     0-1", "1     2-3"]
    assert cli.main([*words, "--parallel.ranks", "1"]) == 0
    assert "samples a step" not in capfd.readouterr().out
