"""Speed of decode steps on random weights, beside ceilings and Transformers' own caches."""

from .run import Case, run

__all__ = ["Case", "run"]
