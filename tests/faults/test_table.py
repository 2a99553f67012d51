"""Whatever befalls a run, it goes on from its newest complete checkpoint or ends with one line, and loses no data."""

import pytest

from faults.table import FAULTS, Outcome


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_costs_the_steps_since_the_last_save_at_most(fault, run, straight, outcomes):
    told, lost = [fault.bring(run)], 0
    taken, starts, warnings = run.last_step(), len(run.events("start")), len(run.events("warning"))
    if run.newest() == run.steps:
        told.insert(0, "trains on to its end")
    else:
        run.go_on()
        (start,) = run.events("start")[starts:]
        lost = taken - start["step"]
        told += [f'"{run.plain(warning["message"])}"' for warning in run.events("warning")[warnings:]]
        told.append(f"goes on after step {start['step']}")
    run.assert_ended_as(straight)
    outcomes[fault.name] = Outcome("; ".join(filter(None, told)), str(lost))
    assert outcomes[fault.name] == fault.expected
