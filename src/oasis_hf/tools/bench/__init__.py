"""Speed of decode steps on random weights, beside ceilings and Transformers' own caches."""

from .plan import Case, Choices, plan
from .run import run

__all__ = ["Case", "Choices", "plan", "run"]
