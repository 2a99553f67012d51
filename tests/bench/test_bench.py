"""Measurements at a sequence length: rows of real runs, memory's end as one of them, and the search for the longest."""

import json
import signal

import pytest

from polarlm.bench import OOM, Row, as_markdown, draw_rows, longest
from polarlm.bench.memory import host_memory, resident_bytes
from polarlm.cli import main
from polarlm.cli.bench import size
from polarlm.config import UserError, load_run_folder

NUMBERS = (
    *("samples_per_sec", "tokens_per_sec", "model_tflops_per_device", "hardware_tflops_per_device"),
    *("megatron_tflops_per_device", "mfu", "peak_memory_bytes"),
)
SHAPE = "--model.layers 1 --model.hidden 32 --model.heads 4 --model.vocab-size 97 --steps 1 --warmup 0".split()


@pytest.mark.parametrize("limit", [1024, 1500, 4096, 100_000])
def test_the_longest_is_found_within_a_sixteenth(limit):
    tried = []

    def trains(length):
        tried.append(length)
        return length <= limit

    found = longest(trains, 1024, 1 << 20, 64)
    assert limit * 15 / 16 - 64 <= found <= limit
    assert all(length % 64 == 0 for length in tried)
    assert len(tried) <= 14


def test_the_search_ends_where_it_is_told():
    assert longest(lambda length: True, 1024, 5000) == 5000
    assert longest(lambda length: False, 1024, 5000) is None


def test_sizes():
    assert [size(text, "--lengths") for text in ("300", "2k", "1M", "4G")] == [300, 2048, 1 << 20, 4 << 30]
    for text in ("", "2x", "-1", "0", "k", "1.5k"):
        with pytest.raises(UserError, match="--lengths"):
            size(text, "--lengths")


def test_a_run_files_batch_and_end_and_missing_vocabulary_are_no_hindrance(tmp_path, capfd):
    run = tmp_path / "run.yaml"
    run.write_text("train: {tokens: 500, micro_batch_size: 2, global_batch_size: 4}\n", encoding="utf-8")
    shape = "--model.layers 1 --model.hidden 32 --model.heads 4 --steps 1 --warmup 0 --lengths 16 --json".split()
    assert main(["bench", "sequence", str(run), *shape]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert row["outcome"] == "ok"


def test_a_search_that_ends_before_it_begins_is_refused(capfd):
    assert main(["bench", "max-sequence", *SHAPE, "--from", "4k", "--up-to", "1k"]) == 2
    assert capfd.readouterr().err == "error: --from: 4096 is beyond --up-to 1024; begin with a shorter one\n"


def test_a_search_says_where_it_was_ended_and_stays_at_lengths_that_ranks_can_share(monkeypatch, capfd):
    def fits(name, config, task):
        return Row(name, 2, config.train.seq_len, "ok" if config.train.seq_len <= 128 else OOM, {})

    monkeypatch.setattr("polarlm.bench.try_run", fits)
    search = ["bench", "max-sequence", *SHAPE, "--layouts", "ring2", "--from", "64", "--up-to"]
    assert main([*search, "190"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "ring2: longest 128 tokens, and --up-to 190 ended the search"
    assert main([*search, "1k"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "ring2: longest 128 tokens"


def test_memory_of_this_host():
    total, left = host_memory()
    assert 0 < left < total
    assert 10**7 < resident_bytes() < total


def test_rows_of_layouts_and_of_memorys_end(tmp_path, capfd):
    words = ["bench", "sequence", *SHAPE, "--lengths", "64,65", "--layouts", "alone,ring2", "--json"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert rows == json.loads((tmp_path / "sequence.json").read_text())
    assert [(row["layout"], row["seq_len"]) for row in rows] == [
        ("alone", 64),
        ("alone", 65),
        ("ring2", 64),
        ("ring2", 65),
    ]
    assert [row["outcome"] for row in rows[:3]] == ["ok"] * 3
    assert "train.seq_len" in rows[3]["outcome"]
    for row in rows[:3]:
        numbers = row["numbers"]
        assert numbers["tokens_per_sec"] == pytest.approx(row["seq_len"] / numbers["step_time_s"])
        assert 0 < numbers["peak_memory_above_start_bytes"] < numbers["peak_memory_bytes"]
    assert (tmp_path / "sequence.png").read_bytes().startswith(b"\x89PNG")

    # Less than its libraries take.
    assert (
        main(["bench", "sequence", *SHAPE, "--lengths", "64", "--layouts", "data2", "--memory", "64M", "--json"]) == 1
    )
    (row,) = json.loads(capfd.readouterr().out)
    assert row["outcome"] == OOM


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_ends_the_measuring_and_what_was_measured_is_kept(number, code, tmp_path, monkeypatch, capsys):
    lengths = []

    def run_ranks(folder, ranks):
        """In place of ranks that end well at the first length, and by the signal at the second."""
        lengths.append(load_run_folder(folder).train.seq_len)
        (folder / "result.json").write_text(json.dumps(dict.fromkeys(NUMBERS, 2.0)), encoding="utf-8")
        return 0 if len(lengths) == 1 else 128 + number

    monkeypatch.setattr("polarlm.bench.trial._run_ranks", run_ranks)
    command = ["bench", "sequence", *SHAPE, "--lengths", "16,32,64", "--json", "--output", str(tmp_path / "lengths")]
    assert main(command) == code
    assert lengths == [16, 32]
    (kept,) = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "lengths/sequence.json").read_text(encoding="utf-8")) == [kept]
    assert (kept["seq_len"], kept["outcome"]) == (16, "ok")


def test_rows_as_markdown_and_a_picture_of_nothing():
    rows = [Row("alone", 1, 2048, OOM, {}), Row("ring2", 2, 3000, "failed", {})]
    assert [line.split(" | ")[2:4] for line in as_markdown(rows).splitlines()[2:]] == [["2k", OOM], ["3000", "failed"]]
    speed, memory = draw_rows(rows).axes
    assert [line.get_xdata().tolist() for line in memory.lines] == [[], [2048], [], []]
    assert speed.get_legend() is None
