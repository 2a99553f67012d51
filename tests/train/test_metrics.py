"""`metrics.jsonl` after a resume and after a kill."""

import json

from polarlm.train.metrics import MetricsLog


def test_a_resume_cuts_later_steps_and_a_half_written_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, after_step=0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float(step)})
    log.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    log = MetricsLog(path, after_step=2)
    log.write({"step": 3, "loss": 30.0})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.0, 2.0, 30.0]


def test_what_is_no_number_is_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", after_step=0)
    log.write({"step": 1, "loss": float("nan"), "val_bits_per_byte": float("inf")})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "val_bits_per_byte": None}
