"""The plots of one run of `oasis-hf eval`, in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..records import Cells, Record
from .depth import by_depth
from .layers import by_layer
from .scores import budgets, over_budget, over_context, over_cost
from .style import save, styled


def draw(
    folder: Path, about: dict[str, Any], records: list[Record], cells: Cells, kind: str = "svg"
) -> list[str]:
    """Draws what there is to draw.

    Args:
        folder: where the files go.
        about: what the run was made with.
        records: of the run.
        cells: its scores.
        kind: ending of the files, "svg" or "png".

    Returns:
        The names of the files.
    """
    figures = {}
    needles = [record for record in records if len(record["depths"]) == 1 and "score" in record]
    replayed = [record for record in records if "recall_by_layer" in record]
    with styled():
        if budgets(cells):
            figures["budget"] = over_budget(about, cells)
        if len({cell["context"] for cell in cells}) > 1:
            figures["context"] = over_context(about, cells)
        if budgets(cells) and any("hbm_bytes" in cell for cell in cells):
            figures["cost"] = over_cost(about, cells)
        if needles:
            figures["depth"] = by_depth(about, needles)
        if replayed:
            figures["layers"] = by_layer(about, replayed)
        return [save(figure, folder / f"{name}.{kind}").name for name, figure in figures.items()]
