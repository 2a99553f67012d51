"""Pictures and summaries of a run; drawing needs matplotlib, imported when something is drawn.

`draw_loss` writes `report/loss.png`, `summary` says in a few lines what a run did, `read_metrics` reads its steps;
`describe_layout` and `draw_layout` show which rank will hold what. `save_png` writes any figure.
"""

from polarlm.report.layout import describe_layout, draw_layout
from polarlm.report.loss import draw_loss
from polarlm.report.metrics import read_metrics
from polarlm.report.png import save_png
from polarlm.report.summary import summary

__all__ = ["describe_layout", "draw_layout", "draw_loss", "read_metrics", "save_png", "summary"]
