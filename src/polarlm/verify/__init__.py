"""The proof that every layout computes what one process does, on the user's own machine.

`layouts` names them, `models` what is laid out, `batches` what is trained on; `reference` is the plain loop that `rank`
compares the training step with; `traffic` is what a step sends beside the textbook; `run` goes through the layouts, in
processes that `workers` forks. `reference`, `rank`, `meeting` and `run` alone import torch.
"""

from polarlm.verify.layouts import NAMES, Layout, choose_layouts, parse_layout
from polarlm.verify.rows import Row, Table
from polarlm.verify.task import Task, load_result

__all__ = ["NAMES", "Layout", "Row", "Table", "Task", "choose_layouts", "load_result", "parse_layout"]
