"""`polarlm verify` as its user calls it: here, and on ranks that a launcher started."""

import json
import os
import socket
import subprocess
import sys

import pytest

from polarlm import cli, launch
from polarlm.verify.task import save_result

SMALL = ["--model.layers", "1", "--model.hidden", "16", "--model.heads", "2", "--model.vocab-size", "31"]


def test_a_table_for_people(capfd):
    assert cli.main(["verify", "--ranks", "2", "--layouts", "data2,data4", *SMALL]) == 0
    head, right, refused, _, total = capfd.readouterr().out.splitlines()
    assert head.split() == ["layout", "model", "ranks", "loss", "gradient", "norm", "weights", "seconds"]
    assert right.split()[:3] == ["data2", "own", "2"]
    assert "  ok; largest at " in right
    assert refused.split(maxsplit=3)[3] == "not tried: it takes 4 ranks, and there are 2"
    assert total == "1 ok, 0 FAILED, 1 not tried"


def test_a_list_for_programs(capfd):
    assert cli.main(["verify", "--ranks", "2", "--layouts", "alone,data4", "--json", *SMALL]) == 0
    tried, refused = json.loads(capfd.readouterr().out)
    assert (tried["layout"], tried["verdict"], refused["verdict"]) == ("alone", "ok", "not tried")
    assert 0 < tried["gradient"] < tried["bound"] == 1e-5
    assert refused["loss"] is None


def test_one_that_is_wrong_gives_code_1(monkeypatch, capsys):
    from polarlm.cli import verify

    records = [{"verdict": "ok"}, {"verdict": "FAILED"}]
    monkeypatch.setattr(verify, "_on_ranks_of_our_own", lambda task: (0, records))
    assert cli.main(["verify", *SMALL]) == 1
    assert capsys.readouterr().out == "\n1 ok, 1 FAILED, 0 not tried\n"


def test_what_stopped_a_layout_is_shown(monkeypatch, capsys):
    def run_local(command, ranks, logs, environment):
        logs.mkdir()
        (logs / "host.0.log").write_text("Traceback: of that rank\n")
        save_result(logs.parent, [{"verdict": "FAILED", "reason": "it broke"}])
        return 0

    monkeypatch.setattr(launch, "run_local", run_local)
    assert cli.main(["verify", *SMALL]) == 1
    assert capsys.readouterr().err == "Traceback: of that rank\n"


def test_where_none_could_be_tried_nothing_is_proven(capfd):
    assert cli.main(["verify", "--ranks", "2", "--layouts", "data4,zero4-data2", *SMALL]) == 1
    assert capfd.readouterr().out.endswith("\n0 ok, 0 FAILED, 2 not tried\n")


def test_names_of_the_list(capsys):
    assert cli.main(["verify", "--list", "--layouts", "ring2-tensor2"]) == 0
    assert capsys.readouterr().out == "ring2-tensor2  4 ranks\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--layouts", "wat"], "error: --layouts: 'wat'"),
        (["--model.dropout", "0.1", *SMALL], "error: model.dropout: the reference of verify knows 0.0 alone"),
        (["--train.optimizer.name", "muon"], "error: train.optimizer.name: the reference"),
        (["--model.heads", "3", "--model.hidden", "16"], "error: model.layers: is missing"),
        (["--parallel.ranks", "4"], "error: --parallel.ranks: a layout says its own; --ranks N"),
        (["--parallel.tensor=2"], "error: --parallel.tensor: a layout says its axes"),
        (["--ranks", "0"], "error: --ranks: 0 cannot be; give at least 1"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(words, error, capsys):
    assert cli.main(["verify", *words]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(error), output.err
    assert output.out == ""


def test_on_the_ranks_of_a_launcher_one_of_them_speaks():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "polarlm", "verify", "--layouts", "alone,data2", *SMALL]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(command, env=common | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    (first, _), (second, _) = (rank.communicate(timeout=240) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert first.splitlines()[-1] == "2 ok, 0 FAILED, 0 not tried"
    assert second == ""
