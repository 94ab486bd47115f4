"""What the demo prints: the question before, the two answers side by side after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..geometry import GROWTH_TOKENS

if TYPE_CHECKING:
    from ..stats import CacheStats


@dataclass(frozen=True)
class Answer:
    """One arm's answer and what it took.

    Attributes:
        text: The answer.
        tokens: Its ids, the one that ends the turn included.
        prefill_seconds: Time for reading the prompt but its last token.
        ms_per_token: Mean time between two tokens of the answer.
    """

    text: str
    tokens: list[int]
    prefill_seconds: float
    ms_per_token: float


def print_question(console: Console, setup: str, hidden: str | None, question: str) -> None:
    """Prints the setup, the hidden fact if there is one, and the question."""
    table = _pairs()
    table.add_row("setup", Text(setup))
    if hidden:
        table.add_row("hidden", Text(hidden))
    table.add_row("question", Text(question, style="bold"))
    console.print(_panel(table, "oasis-hf demo"))


def print_report(
    console: Console,
    dense: Answer,
    oasis: Answer,
    stats: CacheStats,
    expected: str | None,
    on_cpu: bool = False,
) -> None:
    """Prints the answers side by side, and below them what the cache counted.

    Args:
        console: where to.
        dense: the answer of dense attention.
        oasis: the answer with an `OasisCache`.
        stats: its counters.
        expected: what a right answer contains.
        on_cpu: say what times of a CPU are worth.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="dim")
    table.add_column("dense", overflow="fold", max_width=42)
    table.add_column("oasis", overflow="fold", max_width=42)
    table.add_row("answer", _marked(dense.text, expected), _marked(oasis.text, expected))
    if expected is not None:
        table.add_row(
            f"contains {expected}", _yes(expected in dense.text), _yes(expected in oasis.text)
        )
    table.add_row("same tokens", "", agreement(dense.tokens, oasis.tokens))
    full, held = (size + stats.native_bytes for size in (stats.full_kv_bytes, stats.hbm_bytes))
    table.add_row("KV in fast memory", megabytes(full), f"{megabytes(held)} ({held / full:.0%})")
    table.add_row("KV in host memory", megabytes(0), megabytes(stats.host_bytes))
    table.add_row(
        "read the prompt", f"{dense.prefill_seconds:.1f} s", f"{oasis.prefill_seconds:.1f} s"
    )
    table.add_row("time per token", f"{dense.ms_per_token:.0f} ms", f"{oasis.ms_per_token:.0f} ms")
    console.print(table)
    for remark in remarks(stats, on_cpu):
        console.print(remark)
    counts = _pairs()
    for label, value in stats.rows():
        counts.add_row(label, value)
    console.print(_panel(counts, "cache.stats()"))


def remarks(stats: CacheStats, on_cpu: bool) -> list[str]:
    """What a reader of the figures must know: a line each."""
    found = []
    if on_cpu:
        found.append("A CPU shows correctness and memory; its times say nothing of a GPU's speed.")
    if stats.host_bytes > stats.full_kv_bytes:
        found.append(
            f"Host memory doubles with the text, then grows by {GROWTH_TOKENS:,} tokens at a time."
        )
    return found


def agreement(dense: list[int], oasis: list[int]) -> str:
    """Says how many of the two answers' tokens are equal, counted from the start."""
    longest = max(len(dense), len(oasis))
    pairs = zip(dense, oasis, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(dense), len(oasis)))
    return f"all {longest}" if same == longest else f"first {same} of {longest}"


def megabytes(count: int) -> str:
    """Formats a number of bytes in MB."""
    return f"{count / 1e6:.1f} MB"


def _pairs() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _panel(table: Table, title: str) -> Panel:
    return Panel(table, title=title, title_align="left", expand=False)


def _marked(answer: str, expected: str | None) -> Text:
    text = Text(answer)
    if expected:
        text.highlight_words([expected], style="bold green")
    return text


def _yes(right: bool) -> Text:
    return Text("yes", style="green") if right else Text("no", style="red")
