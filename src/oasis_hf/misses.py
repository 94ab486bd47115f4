"""What becomes of a wanted block that is not resident: `on_miss`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar


class MissPolicy(ABC):
    """Decides, for each layer, which missing blocks a step waits for.

    A step compares the score of each missing block with the layer's threshold: above it the block
    is fetched before attention; the others are left out of this step, and the best of them fetched
    for the next one, under `fetch_cap`. Asked once for each layer, when the cache is built, so that
    it costs a step nothing and holds in CUDA graphs.

    Attributes:
        name: identifies the policy in reports and saved caches.
        needs_shares: whether thresholds are shares of the attention, which only an index that
            `estimates_mass` scores by, with `reduction="mean"`.
    """

    name: ClassVar[str]
    needs_shares: ClassVar[bool] = False

    @abstractmethod
    def threshold(self, layer: int, layers: int) -> float:
        """The threshold of a layer: -inf waits for every missing block, inf for none.

        Args:
            layer: number of the model layer.
            layers: how many the model has.
        """


class Fetch(MissPolicy):
    """Every missing block is fetched before attention: nothing chosen is left out."""

    name = "fetch"

    def threshold(self, layer: int, layers: int) -> float:
        """As in `MissPolicy`."""
        return -math.inf


class Skip(MissPolicy):
    """No step waits; missing blocks are left out of it."""

    name = "skip"

    def threshold(self, layer: int, layers: int) -> float:
        """As in `MissPolicy`."""
        return math.inf


class Share(MissPolicy):
    """Missing blocks of more than this share of the attention are fetched before attention."""

    name = "share"
    needs_shares = True

    def __init__(self, share: float) -> None:
        self.share = share

    def threshold(self, layer: int, layers: int) -> float:
        """As in `MissPolicy`."""
        return self.share


def policy_of(on_miss: str | float | MissPolicy) -> MissPolicy:
    """The policy that a valid `on_miss` names."""
    if isinstance(on_miss, MissPolicy):
        return on_miss
    if isinstance(on_miss, str):
        return Fetch() if on_miss == "fetch" else Skip()
    return Share(on_miss)
