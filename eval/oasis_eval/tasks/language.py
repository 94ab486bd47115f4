"""Real text itself: the loss of its last tokens, and how close they come to dense attention."""

from __future__ import annotations

from ..sample import Draft, Scene

SCORED = 1000


def language(scene: Scene) -> Draft:
    """Prose without a question; at most a quarter of it is scored."""
    return Draft(scene.prose, (), min(SCORED, scene.context // 4), fewest=1)
