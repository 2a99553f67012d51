"""What a machine does with a run: the speed and memory of its steps at any sequence length, the longest that fits.

`trial` starts the ranks of one measurement in fresh processes and reads what became of it, `rank` is what each of them
does, `memory` ends them before the system would; `table` and `draw` show the rows. `rank` alone imports torch.
"""

from polarlm.bench.draw import draw_rows
from polarlm.bench.search import longest
from polarlm.bench.table import as_markdown, head, line
from polarlm.bench.trial import OOM, Row, Task, try_run

__all__ = ["OOM", "Row", "Task", "as_markdown", "draw_rows", "head", "line", "longest", "try_run"]
