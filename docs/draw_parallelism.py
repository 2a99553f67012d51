"""Draw the pictures of parallelism.md: `python docs/draw_parallelism.py` writes them into docs/pictures/."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).parent / "pictures"
INK, EMPTY = "#3b3f46", "#f3f4f6"
RANKS = ("#7fa9d8", "#e5a184", "#93c48b", "#b79bd6")


def panels(count: int, width: float, height: float, ratios: list[float] | None = None) -> tuple[Figure, list[Axes]]:
    """A row of empty panels."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, width_ratios=ratios)[0]
    for panel in axes:
        panel.set_axis_off()
    return figure, list(axes)


def box(panel: Axes, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
    """A cell with words in it."""
    panel.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.5))
    panel.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=7, color=INK)


def frame(panel: Axes, width: float, height: float, title: str = "") -> None:
    """The panel's extent, downwards as one reads."""
    panel.set(xlim=(0, width), ylim=(height, 0))
    panel.set_title(title, fontsize=8, color=INK)


def data() -> Figure:
    """What each of four data-parallel ranks holds between its uses, by ZeRO stage."""
    figure, axes = panels(4, 8, 2.1)
    kinds = ("parameters", "gradients", "optimizer")
    for stage, panel in enumerate(axes):
        for rank in range(4):
            box(panel, 3.4 + rank, 0, 0.9, 0.9, RANKS[rank], str(rank))
            for row, shared in enumerate((stage >= 3, stage >= 2, stage >= 1), start=1):
                box(panel, 3.4 + rank, row, 0.9, 0.9, EMPTY if shared else RANKS[rank])
                if shared:
                    box(panel, 3.4 + rank, row + 0.225 * rank, 0.9, 0.225, RANKS[rank])
        for row, kind in enumerate(("samples", *kinds)):
            panel.text(3.2, row + 0.45, kind, ha="right", va="center", fontsize=7, color=INK)
        frame(panel, 7.4, 4, f"ZeRO {stage}")
    return figure


def tensor() -> Figure:
    """A block on two tensor-parallel ranks: shared by sequence, by matrix, by sequence, by matrix."""
    figure, (panel,) = panels(1, 8, 1.7)
    steps = [("norm", "S/2"), ("attention", "heads"), ("add, norm", "S/2"), ("feed-forward", "columns"), ("add", "S/2")]
    for number, (name, shared) in enumerate(steps):
        for rank in range(2):
            text = f"{name}\n{shared}{'' if shared == 'S/2' else ' / 2'}"
            box(panel, 2.4 * number, 1.1 * rank, 1.5, 1, RANKS[rank], text)
        if number:
            word = "scatter\nsums" if shared == "S/2" else "gather"
            panel.annotate("", (2.4 * number, 1.05), (2.4 * number - 0.9, 1.05), arrowprops={"arrowstyle": "->"})
            panel.text(2.4 * number - 0.45, 0.75, word, ha="center", va="bottom", fontsize=7, color=INK)
    frame(panel, 11.1, 2.1)
    return figure


def pipeline(ranks: int = 4, microbatches: int = 6) -> Figure:
    """When each rank takes which microbatch under 1F1B, a backward pass twice as long as a forward pass."""
    figure, (panel,) = panels(1, 8, 1.7)
    for rank, passes in enumerate(one_f_one_b(ranks, microbatches)):
        for kind, number, start, length in passes:
            box(panel, start, rank, length, 0.92, RANKS[rank] if kind == "B" else EMPTY, f"{kind}{number}")
        panel.text(-0.4, rank + 0.45, f"stage {rank}", ha="right", va="center", fontsize=7, color=INK)
    frame(panel, 3 * (microbatches + ranks - 1), ranks)
    panel.set_xlim(-2.6)
    return figure


def one_f_one_b(ranks: int, microbatches: int) -> list[list[tuple[str, int, int, int]]]:
    """(kind, microbatch, start, length) of each rank's passes, each as soon as what it waits for is there."""
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, microbatches)
        order = [("F", number) for number in range(ahead)]
        for number in range(microbatches):
            order += [("F", number + ahead)] * (number + ahead < microbatches) + [("B", number)]
        orders.append(order)
    ends: dict[tuple[int, str, int], int] = {}
    free, passes = [0] * ranks, [[] for _ in range(ranks)]
    while any(orders):
        for rank, order in enumerate(orders):
            if not order:
                continue
            kind, number = order[0]
            before = (rank - 1, "F", number) if kind == "F" else (rank + 1, "B", number)
            is_end = before[0] in (-1, ranks)
            if not is_end and before not in ends:
                continue
            start = max(free[rank], 0 if is_end else ends[before])
            length = 1 if kind == "F" else 2
            free[rank] = ends[rank, kind, number] = start + length
            passes[rank].append((kind, number, start, length))
            order.pop(0)
    return passes


def ring(ranks: int = 4) -> Figure:
    """Which rank has which chunk of a sequence, and computes which pairs of queries and keys."""
    figure, (panel, pairs) = panels(2, 8, 2.4, [1.6, 1])
    owners = [*range(ranks), *reversed(range(ranks))]
    for chunk, owner in enumerate(owners):
        box(panel, chunk, 0, 1, 0.8, RANKS[owner], f"rank {owner}")
    panel.text(0, -0.15, "a sequence, in 2n chunks", fontsize=7, color=INK)
    for rank in range(ranks):
        box(panel, 2 * rank + 0.3, 2, 1.2, 0.8, RANKS[rank], f"queries of {rank}")
        panel.annotate("", (2 * rank + 2.2, 2.4), (2 * rank + 1.55, 2.4), arrowprops={"arrowstyle": "->"})
    panel.text(
        0, 1.75, "keys and values travel on, rank to rank, and from the last to the first", fontsize=7, color=INK
    )
    frame(panel, 2 * ranks + 0.3, 3.2)
    for query, owner in enumerate(owners):
        for key in range(2 * ranks):
            box(pairs, key, query, 1, 1, RANKS[owner] if key <= query else EMPTY)
    frame(pairs, 2 * ranks, 2 * ranks, "pairs (query down, key across):\neach rank has as many")
    return figure


def ulysses(ranks: int = 4) -> Figure:
    """Heads down, sequence across: who holds what before, in and after attention."""
    figure, axes = panels(3, 8, 2.1)
    titles = ("projections: a part of the sequence", "attention: a part of the heads", "output: a part of the sequence")
    for number, (panel, title) in enumerate(zip(axes, titles, strict=True)):
        for head in range(ranks):
            for chunk in range(ranks):
                box(panel, chunk, head, 1, 1, RANKS[head if number == 1 else chunk])
            panel.text(-0.1, head + 0.5, f"head {head}", ha="right", va="center", fontsize=6, color=INK)
        frame(panel, ranks + 1, ranks, title)
        panel.set_xlim(-1)
        if number < 2:
            panel.annotate("", (ranks + 0.95, 2), (ranks + 0.15, 2), arrowprops={"arrowstyle": "->"})
            panel.text(ranks + 0.55, 1.8, "all to all", ha="center", fontsize=6, color=INK)
    return figure


def hybrid() -> Figure:
    """Heads down, sequence across, on two nodes of two ranks: who holds what, and whom each rank talks to."""
    figure, (before, within, talk) = panels(3, 8, 2.1)
    chunks = [0, 2, 3, 1]  # of four: the first ring rank, ranks 0 and 1, has the outer ones
    for head in range(4):
        for place, owner in enumerate(chunks):
            box(before, place, head, 1, 1, RANKS[owner])
            box(within, place, head, 1, 1, RANKS[2 * (owner // 2) + head // 2])
        for panel in (before, within):
            panel.text(-0.1, head + 0.5, f"head {head}", ha="right", va="center", fontsize=6, color=INK)
    frame(before, 5, 4, "projections: a part of the sequence")
    frame(within, 5, 4, "after the exchange: a part of the heads")
    for panel in (before, within):
        panel.set_xlim(-1)
    both_ways, on = {"arrowstyle": "<->", "color": INK}, {"arrowstyle": "<->", "color": INK, "linestyle": "--"}
    for rank in range(4):
        node, seat = divmod(rank, 2)
        box(talk, 3 * node, 1.6 * seat + 0.4, 1.4, 0.9, RANKS[rank], f"rank {rank}")
        if node == 0:
            talk.annotate("", (3, 1.6 * seat + 0.85), (1.4, 1.6 * seat + 0.85), arrowprops=on)
            talk.text(2.2, 1.6 * seat + 0.7, "ring", ha="center", fontsize=6, color=INK)
        if seat == 0:
            talk.annotate("", (3 * node + 0.7, 2), (3 * node + 0.7, 1.3), arrowprops=both_ways)
            talk.text(3 * node + 0.8, 1.7, "all to all", va="center", fontsize=6, color=INK)
            talk.text(3 * node + 0.7, 0.25, f"node {node}", ha="center", fontsize=6, color=INK)
    frame(talk, 4.6, 4, "neighbours exchange, nodes make rings")
    return figure


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (data, tensor, pipeline, ring, ulysses, hybrid):
        draw().savefig(FOLDER / f"{draw.__name__}.png")
