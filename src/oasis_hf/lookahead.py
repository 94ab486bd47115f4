"""Which blocks the next step will want, from what is known when a step or a verification ends.

A predictor sees a batch of finished *rounds*, each a step of decoding or a verification of drafts.
Its scores are ranked like those of an index: the best blocks are fetched ahead. Whether that beats
merely keeping the blocks that were used last is a question for measurement: `oasis-hf lookahead`.
The cache asks the one that its option `lookahead` names.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

NEG_INF = float("-inf")
LRU = "lru"
"""No predictor: the blocks that were used last stay."""


@dataclass(frozen=True)
class Rounds:
    """One layer's view of B finished rounds of up to T rows, numbered by position.

    Attributes:
        rows: `[B]` rows that were verified: the last committed token, then drafts.
        accepted: `[B]` the last row that was accepted; 0 if all drafts were rejected.
        probes: `[B]` rows after those, fed to look ahead alone and never accepted.
        width: T, the most rows and probes of a round.
        committed: `[B]` blocks in the store.
        match: `[B]` position of the token that followed the latest earlier occurrence of the newest
            n-gram, -1 where there is none, or where nobody looked.
        block: tokens per block.
        rank: the index's score `[B, H, N]` of all blocks for rows `[B, T]` (bool).
        rank_layer: likewise for the next round's rows, with queries of the layer before; None for
            the first layer.
        following: `[B, H, N]` the index's score in the next round; None where that is to come.
    """

    rows: Tensor
    accepted: Tensor
    probes: Tensor
    width: int
    committed: Tensor
    match: Tensor
    block: int
    rank: Callable[[Tensor], Tensor]
    rank_layer: Callable[[], Tensor] | None
    following: Tensor | None

    @property
    def number(self) -> Tensor:
        """`[1, T]` number of each row."""
        return torch.arange(self.width, device=self.rows.device)[None]

    @property
    def last(self) -> Tensor:
        """`[B, T]` bool, the last accepted row."""
        return self.number == self.accepted[:, None]


class Predictor(ABC):
    """Scores blocks for the next round.

    Attributes:
        name: identifies the predictor in commands and results.
        needs: what of a round it needs that the cache does not know when a step ends, in words:
            only recordings are then good enough. None for one that the cache can use. There all
            rows of a verification count as accepted, as it is not known yet which are.
    """

    name: ClassVar[str]
    needs: ClassVar[str | None] = None

    @abstractmethod
    def score(self, rounds: Rounds) -> Tensor:
        """`[B, H, N]` float32, larger for blocks more likely wanted; -inf asks for nothing."""


class Last(Predictor):
    """The last accepted row's query. FreeKV's choice: the previous step's."""

    name = "last"

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        return rounds.rank(rounds.last)


class Rows(Predictor):
    """All verified rows, rejected ones too: what the round itself attended by."""

    name = "rows"

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        return rounds.rank(rounds.number < rounds.rows[:, None])


class Past(Predictor):
    """Rejected rows: right positions, wrong tokens. The last accepted row where there are none."""

    name = "past"
    needs = "what was rejected"

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        number = rounds.number
        past = (number > rounds.accepted[:, None]) & (number < rounds.rows[:, None])
        return rounds.rank(torch.where(past.any(1, keepdim=True), past, rounds.last))


class Draft(Predictor):
    """Extra draft rows, fed to look ahead: OasisKV's choice. The last accepted row without any."""

    name = "draft"
    needs = "rows fed to look ahead"

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        ahead = rounds.number - rounds.rows[:, None]
        probes = (ahead >= 0) & (ahead < rounds.probes[:, None])
        return rounds.rank(torch.where(probes.any(1, keepdim=True), probes, rounds.last))


class Layer(Predictor):
    """The hidden state before the previous layer, through this layer's query projection.

    InfiniGen's choice. Known one layer ahead instead of one step; the first layer has none before
    it, and takes the last accepted row.
    """

    name = "layer"
    needs = "hidden states"

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        return rounds.rank(rounds.last) if rounds.rank_layer is None else rounds.rank_layer()


class NGram(Predictor):
    """Blocks around the place where the newest n-gram occurred before; no queries at all."""

    name = "ngram"
    needs = "token ids"
    reach = 2

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        assert rounds.following is not None
        number = torch.arange(rounds.following.shape[-1], device=rounds.match.device)
        distance = (number[None] - rounds.match[:, None] // rounds.block).abs()
        near = (distance <= self.reach) & (rounds.match[:, None] >= 0)
        near = near & (number[None] < rounds.committed[:, None])
        score = torch.where(near, 1 / (1 + distance), NEG_INF)
        return score[:, None].expand_as(rounds.following)


class Oracle(Predictor):
    """What the next round will say. A bound: it needs the future."""

    name = "oracle"
    needs = "the future"

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        assert rounds.following is not None
        number = torch.arange(rounds.following.shape[-1], device=rounds.committed.device)
        stored = number[None] < rounds.committed[:, None]
        return torch.where(stored[:, None], rounds.following, NEG_INF)


class Union(Predictor):
    """The larger of several scores."""

    name = "union"

    def __init__(self, parts: list[Predictor]) -> None:
        self.parts = parts
        self.needs = next((part.needs for part in parts if part.needs), None)  # type: ignore[misc]

    def score(self, rounds: Rounds) -> Tensor:
        """As in `Predictor`."""
        return torch.stack([part.score(rounds) for part in self.parts]).amax(0)


PREDICTORS: dict[str, type[Predictor]] = {
    cls.name: cls for cls in (Last, Rows, Past, Draft, Layer, NGram, Oracle)
}


def predictor(name: str) -> Predictor:
    """The predictor of a name such as "last", or the union of several: "last+layer".

    Raises:
        ValueError: a name is unknown.
    """
    names = name.split("+")
    unknown = [part for part in names if part not in PREDICTORS]
    if unknown:
        raise ValueError(
            f"predictor: got {', '.join(map(repr, unknown))}, expected some of "
            f"{', '.join(PREDICTORS)}, joined by '+'"
        )
    parts = [PREDICTORS[part]() for part in names]
    return parts[0] if len(parts) == 1 else Union(parts)
