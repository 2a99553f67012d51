"""How ranks part."""

import os

import pytest
import torch.distributed as dist

from polarlm.parallel import end_with, join_world


@pytest.fixture
def barriers(monkeypatch):
    """A process group whose tear-down fails, and how often that was tried."""
    tried = []

    def barrier(*_, **__):
        tried.append(True)
        raise RuntimeError("Connection closed by peer")

    for name in ("TCPStore", "init_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "barrier", barrier)
    return tried


def test_l07_a_tear_down_that_fails_is_told_and_fails_no_run(barriers, capsys):
    with join_world(0, 2, 0, "127.0.0.1", 1) as world:
        assert world.size == 2
    assert barriers == [True]
    assert "the process group did not close cleanly: Connection closed by peer" in capsys.readouterr().err


def test_a_rank_that_fails_does_not_wait_for_the_others(barriers):
    with pytest.raises(ValueError, match="its own"), join_world(0, 2, 0, "127.0.0.1", 1):
        raise ValueError("its own")
    assert barriers == []


def _fails():
    raise ValueError("its own")


@pytest.mark.parametrize(
    ("work", "code", "said"), [(lambda: 0, 0, ""), (lambda: 2, 2, ""), (_fails, 1, "ValueError: its own")]
)
def test_a_ranks_last_act_keeps_its_code_and_words_whatever_the_tear_down_would_do(work, code, said, capfd):
    """A group that is left open has torch end some processes with SIGABRT in the interpreter's tear-down."""
    child = os.fork()
    if child == 0:
        print("written", end="")
        try:
            end_with(work)
        finally:  # where the tear-down would begin
            os._exit(134)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == code
    out, err = capfd.readouterr()
    assert out == "written"
    assert said in err
