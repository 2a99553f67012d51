"""Pictures and summaries from the files of a run; drawing needs matplotlib, imported when something is drawn.

`draw_loss` writes `report/loss.png`, `summary` says in a few lines what a run did, `read_metrics` reads its steps.
"""

from polarlm.report.loss import draw_loss
from polarlm.report.metrics import read_metrics
from polarlm.report.summary import summary

__all__ = ["draw_loss", "read_metrics", "summary"]
