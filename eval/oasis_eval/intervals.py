"""Bootstrap intervals of means and of paired differences; Wilson's of a proportion."""

from __future__ import annotations

import math
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


def bootstrap(values: Sequence[float]) -> Estimate:
    """The percentile bootstrap of a mean (Efron, 1979); always the same for the same values.

    Values that are all equal give an interval of no width, which says that the sample shows no
    spread, not that there is none.

    Raises:
        ValueError: there are no values.
    """
    return stratified([values])


def stratified(groups: Sequence[Sequence[float]]) -> Estimate:
    """The same of the mean of the groups' means: groups count alike, and are resampled apart.

    Raises:
        ValueError: there is no group, or one without values.
    """
    if not groups or not all(len(group) for group in groups):
        raise ValueError("values: got none, expected at least one")
    draw = np.random.default_rng(0)
    resampled = np.mean([_means(np.asarray(group, float), draw) for group in groups], axis=0)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    mean = sum(sum(group) / len(group) for group in groups) / len(groups)
    return Estimate(float(mean), float(low), float(high), sum(map(len, groups)))


def _means(values: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Means of `RESAMPLES` samples with replacement; in parts, so that they take little memory."""
    parts = [1000] * (RESAMPLES // 1000)
    chosen = (draw.integers(len(values), size=(part, len(values))) for part in parts)
    return np.concatenate([values[places].mean(1) for places in chosen])


def paired(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of `values[i] - others[i]`, by resampling pairs.

    Raises:
        ValueError: the lengths differ, or are zero.
    """
    if len(values) != len(others):
        raise ValueError(f"values: got {len(values)} and {len(others)}, expected pairs")
    return bootstrap([one - other for one, other in zip(values, others, strict=True)])


def wilson(hits: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson, 1927), rounded to three places."""
    if not total:
        return 0.0, 1.0
    share, spread = hits / total, z * z / total
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    low, high = ((end / (1 + spread)) for end in (middle - half, middle + half))
    return round(low, 3), round(high, 3)
