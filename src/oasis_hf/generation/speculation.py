"""How many tokens to draft: a fixed number, or none where measured times say so."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

COUNTS = ("rounds", "drafted_rounds", "tokens", "lived")
"""What is summed over rounds; `lived` is sequences that were still being generated."""


@dataclass(frozen=True)
class SpeculationReport:
    """What speculation did in one generation.

    Attributes:
        draft_length: tokens drafted per sequence in a round with drafts.
        rounds: forwards of the model behind the prompt.
        drafted_rounds: of these, rounds that verified drafts.
        drafted: drafts verified, over all sequences.
        accepted: drafts accepted.
        drafted_by_row: drafts verified of each sequence, in the order of the batch.
        accepted_by_row: of these, drafts accepted.
        tokens: tokens generated in these rounds, over all sequences.
        tokens_per_round: of one sequence, while it was being generated.
        draft_seconds: time spent drafting.
        verify_seconds: time spent verifying, and on everything else of a round.
    """

    draft_length: int
    rounds: int
    drafted_rounds: int
    drafted: int
    accepted: int
    drafted_by_row: tuple[int, ...]
    accepted_by_row: tuple[int, ...]
    tokens: int
    tokens_per_round: float
    draft_seconds: float
    verify_seconds: float

    @property
    def acceptance(self) -> float:
        """Share of the drafts that were accepted."""
        return self.accepted / max(1, self.drafted)

    @property
    def acceptance_by_row(self) -> tuple[float, ...]:
        """The same for each sequence; 0 for one that had no drafts."""
        pairs = zip(self.accepted_by_row, self.drafted_by_row, strict=True)
        return tuple(accepted / max(1, drafted) for accepted, drafted in pairs)


@dataclass
class Speculation:
    """Decides, round by round, whether to draft, and counts what came of it.

    Deterministic: what it decides follows from the numbers it was given. An adaptive one tries
    drafts, then plain rounds, stays for a while with what gave more tokens a second, and tries the
    other way again. Of the times of a stretch of rounds it takes the median, so that a round which
    captures a graph does not count.

    Args:
        draft_length: tokens drafted per sequence; 0 for none.
        adaptive: leave drafts out where they do not pay.
        trial: rounds that a way is tried for.
        patience: rounds before the slower way is tried again.

    Raises:
        ValueError: a number that cannot be used.
    """

    draft_length: int
    adaptive: bool = False
    trial: int = 8
    patience: int = 64
    _counts: dict[str, int] = field(init=False, repr=False)
    _drafted: list[int] = field(init=False, repr=False)
    _accepted: list[int] = field(init=False, repr=False)
    _draft_seconds: float = field(init=False, repr=False)
    _verify_seconds: float = field(init=False, repr=False)
    _rates: dict[bool, float] = field(init=False, repr=False)
    _stretch: list[tuple[float, float]] = field(init=False, repr=False)
    _drafting: bool = field(init=False, repr=False)
    _trying: bool = field(init=False, repr=False)
    _left: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, least in (("draft_length", 0), ("trial", 1), ("patience", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name}: got {value!r}, expected a whole number of at least {least}"
                )
        self.start()

    def start(self, sequences: int = 0) -> None:
        """Forget everything: a new generation, of so many sequences, begins."""
        self._counts = dict.fromkeys(COUNTS, 0)
        self._drafted, self._accepted = [0] * sequences, [0] * sequences
        self._draft_seconds = self._verify_seconds = 0.0
        self._rates, self._stretch = {}, []
        self._drafting, self._trying, self._left = True, True, self.trial

    def next_length(self) -> int:
        """Tokens to draft in the next round."""
        return self.draft_length if self._drafting else 0

    def record(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        tokens: int,
        sequences: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Take note of a round.

        Args:
            drafted: drafts verified, of each sequence of the batch.
            accepted: of these, drafts accepted.
            tokens: tokens generated, over all sequences.
            sequences: sequences that were still being generated.
            draft_seconds: time that drafting took.
            verify_seconds: time that the rest of the round took.
        """
        sums = (1, int(any(drafted)), tokens, sequences)
        for name, value in zip(COUNTS, sums, strict=True):
            self._counts[name] += value
        self._drafted = _added(self._drafted, drafted)
        self._accepted = _added(self._accepted, accepted)
        self._draft_seconds += draft_seconds
        self._verify_seconds += verify_seconds
        if not self.adaptive or not self.draft_length:
            return
        self._stretch.append((tokens / max(1, sequences), draft_seconds + verify_seconds))
        self._left -= 1
        if not self._left:
            self._decide()

    def _decide(self) -> None:
        """A stretch is over: go on with the better way, or try the other."""
        tokens, seconds = zip(*self._stretch, strict=True)
        usual = max(statistics.median_low(seconds), 1e-9)
        self._rates[self._drafting] = statistics.mean(tokens) / usual
        self._stretch = []
        if len(self._rates) < 2 or not self._trying:
            self._drafting, self._trying, self._left = not self._drafting, True, self.trial
        else:
            self._drafting = self._rates[True] >= self._rates[False]
            self._trying, self._left = False, self.patience

    def report(self) -> SpeculationReport:
        """The counts so far."""
        counts = dict(self._counts)
        rate = counts["tokens"] / max(1, counts.pop("lived"))
        return SpeculationReport(
            **counts,
            draft_length=self.draft_length,
            drafted=sum(self._drafted),
            accepted=sum(self._accepted),
            drafted_by_row=tuple(self._drafted),
            accepted_by_row=tuple(self._accepted),
            tokens_per_round=rate,
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
        )


def _added(sums: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """Sums of each sequence, and its number more."""
    return [a + b for a, b in zip_longest(sums, numbers, fillvalue=0)]
