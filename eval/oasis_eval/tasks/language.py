"""Real text itself: its last tokens, or a long output in their place."""

from __future__ import annotations

from .parts import Draft, Scene

SCORED = 1000
GENERATED = 2048


def language(scene: Scene) -> Draft:
    """Prose without a question; at most a quarter of it is scored."""
    return Draft(scene.prose, (), min(SCORED, scene.context // 4), fewest=1)


def long_output(scene: Scene) -> Draft:
    """Prose whose last tokens, a third at most, give way to an output of the model's own."""
    return Draft(scene.prose, (), min(GENERATED, scene.context // 3), fewest=1)
