"""Needles found over the budget."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..labels import index_label, index_order
from .scores import DENSE_LINE
from .style import doublings, entitle, figure_of, legend, looks


def needles(results: dict[str, Any]) -> Figure:
    """Needles answered over budget, misses fetched: a line per index, a panel per context."""
    cells = [cell for cell in results["cells"] if cell["on_miss"] == "fetch"]
    contexts = sorted({cell["context"] for cell in cells})
    indexes = sorted({cell["index"] for cell in cells}, key=index_order)
    look = looks(indexes)
    figure, panels = figure_of(1, len(contexts), (max(5.6, 4.6 * len(contexts)), 4.2))
    for axes, context in zip(panels[0], contexts, strict=True):
        here = [cell for cell in cells if cell["context"] == context]
        for index in indexes:
            points = sorted((c["budget"], c["hits"]) for c in here if c["index"] == index)
            if points:
                x, hits = zip(*points, strict=True)
                said = index_label(index).replace("`", "")
                axes.plot(look[index].beside(x), hits, label=said, **look[index].line())
        count = max(cell["of"] for cell in here)
        axes.axhline(count, label="dense attention", zorder=0, **DENSE_LINE)
        budgets = sorted({cell["budget"] for cell in here})
        doublings(axes, budgets, "budget, tokens per KV head (log scale)")
        axes.set_title(f"{context:,} tokens of context")
        axes.set_ylabel(f"needles answered, of {count}")
        axes.set_ylim(-0.05 * count, 1.08 * count)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="0.9")
    about = results["about"]
    entitle(
        figure,
        f"{about['model']}, {about['dtype']}: one five-digit number hidden in prose "
        f"('{about['text']}'), of those that dense attention answers",
        "A missing block is fetched. Points of one budget are set side by side.",
    )
    legend(figure, 3)
    return figure
