"""docs/reliability.md holds the table as it was measured."""

import re
from pathlib import Path

from faults.conftest import row
from faults.table import FAULTS
from faults.test_kills import KILLS, name_of

PAGE = Path(__file__).parents[2] / "docs/reliability.md"


def test_the_page_has_every_fault_with_what_is_measured_of_it_and_no_other():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| (?!fault |-)", line)]
    walks, others = rows[: len(KILLS)], rows[len(KILLS) :]
    assert [line.split(" | ")[0] for line in walks] == [f"| {name_of(ranks)}" for ranks in KILLS]
    assert others == [row(fault.name, fault.expected) for fault in FAULTS]
