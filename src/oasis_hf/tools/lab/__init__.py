"""Replays of real queries: how many wanted blocks are resident in time, by predictor."""

from .grid import Grid, measure
from .recording import Recording, Run
from .replay import Options, Outcome, replay
from .scores import Scores, score

__all__ = [
    "Grid",
    "Options",
    "Outcome",
    "Recording",
    "Run",
    "Scores",
    "measure",
    "replay",
    "score",
]
