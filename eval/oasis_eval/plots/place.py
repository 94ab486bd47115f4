"""Words next to points, where they cover as little as possible."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OFFSETS = ((0, 7), (0, -13), (9, -3), (-9, -3), (8, 5), (-8, 5), (8, -11), (-8, -11), (0, 15))
"""Of a word from its point, in points; the first are the nicest."""
LETTER, HEIGHT, RADIUS = 3.6, 7.0, 3.5
"""Sizes of the words and of the points, in points."""
Box = tuple[float, float, float, float]


def name_points(
    figure: Figure, points: Sequence[tuple[Axes, float, float, str, str]], size: float = 6
) -> None:
    """Writes a word at each point: panel, x, y, word and colour. Limits must be set before."""
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    marks: dict[Axes, list[Box]] = {}
    for axes, x, y, _, _ in points:
        left, bottom = axes.transData.transform((x, y)) * scale
        box = (left - RADIUS, bottom - RADIUS, left + RADIUS, bottom + RADIUS)
        marks.setdefault(axes, []).append(box)
    taken: dict[Axes, list[Box]] = {axes: list(boxes) for axes, boxes in marks.items()}
    for axes, x, y, word, colour in points:
        left, bottom = axes.transData.transform((x, y)) * scale
        boxes = [_box(left + dx, bottom + dy, dx, word) for dx, dy in OFFSETS]
        covered = [sum(_shared(box, other) for other in taken[axes]) for box in boxes]
        best = covered.index(min(covered))
        taken[axes].append(boxes[best])
        dx, dy = OFFSETS[best]
        text = axes.annotate(
            word,
            (x, y),
            (dx, dy),
            textcoords="offset points",
            fontsize=size,
            color=colour,
            ha="center" if not dx else "left" if dx > 0 else "right",
            annotation_clip=False,
        )
        text.set_in_layout(False)


def _box(x: float, y: float, dx: float, word: str) -> Box:
    """Where a word stands: left, bottom, right, top."""
    width = LETTER * len(word)
    left = x - width / 2 if not dx else x if dx > 0 else x - width
    return left, y, left + width, y + HEIGHT


def _shared(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
