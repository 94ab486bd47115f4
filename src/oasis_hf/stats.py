"""Counters on the device, and the report made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from .ops import SUMS as COUNTS


class LayerCounters:
    """Sums over steps, heads and sequences, kept on the device so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(COUNTS), dtype=torch.long, device=device)

    def read(self) -> dict[str, int]:
        """The sums; waits for the device."""
        return dict(zip(COUNTS, self.sums.tolist(), strict=True))


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds and did. Shares are of the blocks wanted, over all steps and layers.

    Attributes:
        context_tokens: tokens given, padding included.
        batch_size: sequences.
        sparse_layers: offloaded layers.
        native_layers: layers that Transformers' own cache layers serve (sliding, linear, shared).
        budget_tokens: tokens chosen per KV head and step, besides the tail, where there are as
            many: the budget in whole blocks; None for all.
        budget_asked: the budget as it was asked for.
        block_tokens: tokens per block.
        resident_tokens: slots per KV head that are allocated, in tokens; they follow the context up
            to the budget and its head room.
        steps: sparse forwards.
        hit_rate: wanted blocks that were resident.
        fetched_now: wanted blocks fetched before attention (exposed).
        admitted: wanted blocks fetched in the background, for the next step.
        refused: wanted blocks that the cap left out.
        cap_blocks: blocks per head that the next step may fetch in the background; 0 where
            on_miss="fetch" leaves none. This and the next three are those of the first offloaded
            layer's device.
        cap_share: the same as a share of the budget.
        link_rate: bytes per second of the link that `fetch_cap="auto"` chose it by, on a grid; None
            if it did not.
        step_floor: seconds that it took a step for, at least.
        turnover: wanted blocks that the step before did not want.
        bytes_fetched: bytes that crossed from the full store, the first fill included.
        bytes_filled: of these, the first fill after a prompt.
        rounds: verifications of drafts.
        drafted: drafts verified.
        accepted: drafts accepted.
        hbm_bytes: working set in fast memory: pool, tail, index and tables, as allocated.
        hbm_used_bytes: of these, what holds tokens: resident blocks, the tail's tokens and their
            index.
        index_bytes: of these, the index.
        native_bytes: K and V that native layers hold.
        host_bytes: the full store, as allocated.
        host_used_bytes: of these, what holds tokens.
        full_kv_bytes: what a dense cache would hold for the same tokens in these layers.
        note: what a reader should know first.
    """

    context_tokens: int
    batch_size: int
    sparse_layers: int
    native_layers: int
    budget_tokens: int | None
    budget_asked: int | None
    block_tokens: int
    resident_tokens: int
    steps: int
    hit_rate: float
    fetched_now: float
    admitted: float
    refused: float
    cap_blocks: int
    cap_share: float
    link_rate: float | None
    step_floor: float | None
    turnover: float
    bytes_fetched: int
    bytes_filled: int
    rounds: int
    drafted: int
    accepted: int
    hbm_bytes: int
    hbm_used_bytes: int
    index_bytes: int
    native_bytes: int
    host_bytes: int
    host_used_bytes: int
    full_kv_bytes: int
    note: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the report."""
        shares = [
            f"{self.hit_rate:.1%} hit",
            f"{self.fetched_now:.1%} fetched before attention",
            f"{self.admitted:.1%} in the background",
            f"{self.refused:.1%} refused by the cap",
        ]
        lines = [
            ("context", f"{self.context_tokens:,} tokens x {self.batch_size}"),
            (
                "layers",
                f"{self.sparse_layers} offloaded, {self.native_layers} left to Transformers",
            ),
            (
                "working set",
                f"{self._attended()} attended, {self.resident_tokens:,} resident "
                "(per KV head, besides the tail)",
            ),
            ("sparse steps", f"{self.steps:,}"),
        ]
        if self.steps:
            lines.append(("wanted blocks", ", ".join(shares)))
            if self.cap_blocks or self.refused:
                lines.append(("cap", self._cap()))
            lines.append(("turnover", f"{self.turnover:.1%} of the choice changes per step"))
            per_step = (self.bytes_fetched - self.bytes_filled) / self.steps
            lines.append(
                (
                    "moved",
                    f"{_size(self.bytes_filled)} first fill, then {_size(per_step)} per step",
                )
            )
        if self.rounds:
            rate = self.accepted / max(1, self.drafted)
            lines.append(
                (
                    "drafts",
                    f"{self.accepted}/{self.drafted} accepted ({rate:.0%}) in {self.rounds} rounds",
                )
            )
        lines += [
            (
                "fast memory",
                f"{_size(self.hbm_bytes)}, index {_size(self.index_bytes)} of it; "
                f"{_size(self.hbm_used_bytes)} in use",
            ),
            (
                "full KV",
                f"{_size(self.full_kv_bytes)}, in host memory {_size(self.host_bytes)}; "
                f"{_size(self.host_used_bytes)} in use",
            ),
        ]
        if self.native_bytes:
            lines.append(("native layers", f"{_size(self.native_bytes)} in fast memory"))
        return [*lines, ("note", self.note)]

    def _attended(self) -> str:
        """The budget, and what was asked for where that is no whole number of blocks."""
        if self.budget_tokens is None:
            return "all tokens"
        text = f"{self.budget_tokens:,} tokens"
        if self.budget_asked == self.budget_tokens:
            return text
        return f"{text} ({self.budget_asked:,} rounded up to blocks of {self.block_tokens})"

    def _cap(self) -> str:
        """What may be fetched in the background, and why."""
        text = f"{self.cap_blocks:,} blocks per head and step ({self.cap_share:.1%} of the budget)"
        if self.link_rate is None or self.step_floor is None:
            return text
        return (
            f"{text}: a link of {_size(self.link_rate)}/s beside a step of at least "
            f"{1e3 * self.step_floor:.2f} ms"
        )

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _size(count: float) -> str:
    """Bytes in the largest unit that keeps at least one digit before the point."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
