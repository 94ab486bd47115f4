"""Bootstrap intervals of means and of paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval.

    Attributes:
        mean: of the values.
        low: lower end of the 95 % interval.
        high: upper end.
        count: of the values.
    """

    mean: float
    low: float
    high: float
    count: int


def bootstrap(values: Sequence[float], resamples: int = RESAMPLES) -> Estimate:
    """The percentile bootstrap of a mean (Efron, 1979); always the same for the same values.

    Values that are all equal give an interval of no width, which says that the sample shows no
    spread, not that there is none.

    Raises:
        ValueError: there are no values.
    """
    if not len(values):
        raise ValueError("values: got none, expected at least one")
    array = np.asarray(values, dtype=float)
    draw = np.random.default_rng(0)
    # In parts, so that long lists take little memory.
    means = np.concatenate(
        [
            array[draw.integers(len(array), size=(part, len(array)))].mean(1)
            for part in [1000] * (resamples // 1000)
        ]
    )
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def paired(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of `values[i] - others[i]`, by resampling pairs.

    Raises:
        ValueError: the lengths differ, or are zero.
    """
    if len(values) != len(others):
        raise ValueError(f"values: got {len(values)} and {len(others)}, expected pairs")
    return bootstrap([one - other for one, other in zip(values, others, strict=True)])
