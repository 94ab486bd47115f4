"""What the titles of a run's plots say: which model answered what."""

from __future__ import annotations

from typing import Any

from ..records import OVERALL, Cells


def subject(about: dict[str, Any]) -> str:
    """The model and its type."""
    return f"{about['model']}, {about['dtype']}"


def tasks_of(cells: Cells, about: dict[str, Any]) -> str:
    """The tasks of some records or cells, with what was drawn for them."""
    tasks = dict.fromkeys(cell["task"] for cell in cells if cell["task"] != OVERALL)
    mean = "mean over tasks " if len(tasks) > 1 else "task "
    samples = about.get("config", {}).get("samples")
    drawn = f", {samples} samples each" if samples else ""
    return f"{mean}{', '.join(tasks)}{drawn}; text '{about.get('text', '')}'"
