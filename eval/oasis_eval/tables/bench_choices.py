"""Tables of the bench over one choice: what may be fetched, the size of blocks, drafts."""

from __future__ import annotations

import json
from typing import Any

from ..labels import cap_name, cap_of, miss_label, size_label, tools
from ..markdown import table
from ..records import Cells


def bench_caps(results: dict[str, Any]) -> str:
    """What background fetches cost, by size and cap; and of misses fetched before attention."""
    plain = [row for row in _oasis_rows(results) if not row["drafts"]]
    first = plain[0]["options"]
    kept = [
        row
        for row in plain
        if all(row["options"].get(n) == first.get(n) for n in ("budget", "index", "compile"))
        and row["options"]["on_miss"] in (first["on_miss"], "fetch")
    ]
    lines = [
        [
            size_label(row["batch"], row["tokens"]),
            _policy(row),
            "" if row["options"]["on_miss"] == "fetch" else f"{row['stats']['cap_blocks']:,}",
            f"{row['stats']['hit_rate']:.1%}",
            f"{row['link_bytes_per_step'] / 1e6:.1f}",
            f"{row['link_ms']:.2f}",
            f"{row['ms_p50']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['exposed_ms']:.2f}" if "exposed_ms" in row else "",
            f"{row['overlap']:.2f}" if "overlap" in row else "",
        ]
        for row in sorted(kept, key=lambda row: (_place(row, kept), *_by_cap(row)))
    ]
    header = [
        "case",
        "cap",
        "blocks",
        "hits",
        "MB a step",
        "link ms",
        "step ms",
        "tok/s",
        "exposed ms",
    ]
    note = (
        "Blocks: fetched after a step's attention at most, per head. Hits: wanted blocks that are "
        "resident when a step begins. Link ms: these bytes at the rate of a pinned copy. Exposed: "
        "the step beyond that of cap 0, which fetches nothing. Overlap: the step over the longer "
        f"of that one and its link ms. {_bench_machine(results)}"
    )
    return "\n\n".join([table([*header, "overlap"], lines, 2), note])


def bench_blocks(results: dict[str, Any]) -> str:
    """Milliseconds per decode step over the size of blocks, by size, budget and policy."""
    rows = _oasis_rows(results)
    blocks = list(dict.fromkeys(row["options"]["block_size"] for row in rows))
    cases: dict[tuple[str, int, str], dict[int, str]] = {}
    for row in sorted(rows, key=lambda row: _place(row, rows)):
        options = row["options"]
        case = (size_label(row["batch"], row["tokens"]), options["budget"], options["on_miss"])
        shown = f"{row['ms_p50']:.2f} ({100 * row['stats']['hit_rate']:.1f} %)"
        cases.setdefault(case, {})[options["block_size"]] = shown
    lines = (
        [size, f"{budget:,}", miss_label(miss), *(found.get(block, "") for block in blocks)]
        for (size, budget, miss), found in cases.items()
    )
    header = ["case", "budget", "a missing block is", *(f"blocks of {block}" for block in blocks)]
    note = (
        "Milliseconds per step, median (percent of the wanted blocks that are resident when it "
        f"begins). {_bench_machine(results)}"
    )
    return "\n\n".join([table(header, lines, 2), note])


def bench_drafts(results: dict[str, Any]) -> str:
    """Tokens per second of rounds with drafts, and of plain steps of the same options."""
    rows = _oasis_rows(results)
    plain = {_same(row): row for row in rows if not row["drafts"]}
    drafted = [row for row in rows if row["drafts"]]
    kinds = list(dict.fromkeys((row["drafts"], row["acceptance"]) for row in drafted))
    lines = []
    for key in dict.fromkeys(_same(row) for row in sorted(drafted, key=lambda r: _place(r, rows))):
        alone = plain[key]
        found = {(row["drafts"], row["acceptance"]): row for row in drafted if _same(row) == key}
        lines.append(
            [
                size_label(alone["batch"], alone["tokens"]),
                _policy(alone) + (", compiled" if alone["options"].get("compile") else ""),
                f"{alone['tokens_per_second']:,.0f}",
                *(_sped_up(found[kind], alone) if kind in found else "" for kind in kinds),
            ]
        )
    header = ["case", "cap", "plain", *(f"{count} drafts, {how}" for count, how in kinds)]
    said = [f"{how}: {_tokens_per_round(drafted, how)}" for _, how in kinds]
    note = (
        "Tokens per second, and x plain. Where a number is named, each draft is accepted with that "
        "probability, and drafting takes no time. With lookup, the model is deemed to say a "
        "scripted text of records, in which the drafts are looked up in every round. Tokens that a "
        f"sequence keeps of a round: {'; '.join(said)}. {_bench_machine(results)}"
    )
    return "\n\n".join([table(header, lines, 2), note])


def _sped_up(row: dict[str, Any], plain: dict[str, Any]) -> str:
    speed = row["tokens_per_second"]
    return f"{speed:,.0f} ({speed / plain['tokens_per_second']:.2f} x)"


def _oasis_rows(results: dict[str, Any]) -> Cells:
    return [row for row in results["rows"] if row["arm"] == "oasis" and "error" not in row]


def _place(row: dict[str, Any], rows: Cells) -> int:
    """Where the size of a row comes among those of `rows`, which keep their order."""
    sizes = list(dict.fromkeys((other["batch"], other["tokens"]) for other in rows))
    return sizes.index((row["batch"], row["tokens"]))


def _by_cap(row: dict[str, Any]) -> tuple[bool, int, float]:
    """Numbers first, in order; then no limit, auto, and what is fetched before attention."""
    cap = cap_of(row)
    fetched = row["options"]["on_miss"] == "fetch"
    if isinstance(cap, int | float):
        return fetched, 0, float(cap)
    return fetched, 1 if cap is None else 2, 0.0


def _policy(row: dict[str, Any]) -> str:
    """What is done about misses: a cap, as they are skipped, or another policy."""
    miss, cap = row["options"]["on_miss"], cap_of(row)
    if miss == "fetch":
        return "fetched before attention"
    text = "0, no lookahead" if cap == 0 else cap_name(cap)
    return text if miss == "skip" else f"{text}, {miss_label(miss)}"


def _same(row: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for rows of one size and the same options."""
    return row["batch"], row["tokens"], json.dumps(row["options"], sort_keys=True)


def _tokens_per_round(rows: Cells, acceptance: float | str) -> str:
    """Least to most of the cases with drafts of one kind."""
    kept = [row["tokens_per_round"] for row in rows if row["acceptance"] == acceptance]
    low, high = (f"{bound:.1f}" for bound in (min(kept), max(kept)))
    return low if low == high else f"{low} to {high}"


def _bench_machine(results: dict[str, Any]) -> str:
    about, top = results["environment"], results["ceilings"]
    return (
        f"{results['shape']} shape, random weights, bfloat16; device copy "
        f"{top['device_copy'] / 1e12:.2f} TB/s, pinned copy {top['link_copy'] / 1e9:.1f} GB/s. "
        f"{about['gpu']}, {', '.join(tools(about, 'torch', 'triton', 'transformers'))}, "
        f"{about['date'][:10]}, `{about['command']}`."
    )
