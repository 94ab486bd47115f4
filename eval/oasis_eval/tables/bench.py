"""The table of the bench: decode steps and prompts, next to the floor and Transformers' caches."""

from __future__ import annotations

from typing import Any

from ..labels import cache_name, size_label, tools
from ..markdown import table
from ..records import Cells


def bench(results: dict[str, Any]) -> str:
    """Milliseconds per decode step, with the floor and Transformers' own caches; prompts."""
    rows = [row for row in results["rows"] if "error" not in row]
    sizes = list(dict.fromkeys((row["batch"], row["tokens"]) for row in rows))
    rows.sort(key=lambda row: (sizes.index((row["batch"], row["tokens"])), row["arm"] != "oasis"))
    dense = {(row["batch"], row["tokens"]): row["ms_p50"] for row in rows if row["arm"] == "dense"}
    budget = next((row["options"]["budget"] for row in rows if row["arm"] == "oasis"), 0)
    with_prompts = any("prompt_peak_hbm_bytes" in row for row in rows)
    header = ["case", "cache", "p20", "p50", "p80", "tok/s", "x floor", "DynamicCache", "peak HBM"]
    if with_prompts:
        header.append("with a prompt")
    lines = []
    for row in rows:
        cells = [
            size_label(row["batch"], row["tokens"]),
            cache_name(row, budget),
            *(f"{row[key]:.2f}" for key in ("ms_p20", "ms_p50", "ms_p80")),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ratio_to_floor']:.2f}",
            _against_dense(row, dense.get((row["batch"], row["tokens"]))),
            _gigabytes(row["peak_hbm_bytes"]),
        ]
        if with_prompts:
            peak = row.get("prompt_peak_hbm_bytes")
            cells.append("" if peak is None else _gigabytes(peak))
        lines.append(cells)
    parts = [
        table(header, lines, 2),
        _prompts(results.get("prompts", [])),
        _bench_note(results, rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _against_dense(row: dict[str, Any], dense: float | None) -> str:
    if dense is None or row["arm"] == "dense":
        return ""
    faster = dense * row.get("tokens_per_round", 1) / row["ms_p50"]
    return f"{faster:.1f} x faster" if faster >= 1 else f"{1 / faster:.1f} x slower"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _prompts(rows: Cells) -> str:
    """Seconds to the first token; empty if no prompt was measured."""
    rows = [row for row in rows if "error" not in row]
    if not rows:
        return ""
    names = {
        ("oasis", "first"): "oasis, first run",
        ("oasis", "again"): "oasis, again",
        ("dense", "first"): "DynamicCache",
    }
    lines = [
        [
            f"{row['tokens']:,}",
            names[row["prompt"], row["run"]],
            "" if row["prefill_chunk_size"] is None else f"{row['prefill_chunk_size']:,}",
            f"{row['seconds']:.1f} s",
            _gigabytes(row["peak_hbm_bytes"]),
        ]
        for row in rows
    ]
    return table(["prompt", "cache", "tokens a piece", "first token after", "peak HBM"], lines, 2)


def _bench_note(results: dict[str, Any], rows: Cells) -> str:
    about, top = results["environment"], results["ceilings"]
    gather = top["gather"]
    budgets = [row["options"]["budget"] for row in rows if row["arm"] == "oasis"]
    unless = " unless named" if len(set(budgets)) > 1 else ""
    notes = [
        f"{results['shape']} shape, random weights, bfloat16, budget {next(iter(budgets), 0):,}"
        f"{unless}, block 16, cap 0.05; ms per decode step. Floor: max(HBM bytes / copy bandwidth, "
        "link bytes / link bandwidth)."
    ]
    if any(row.get("drafts") for row in rows):
        notes.append(
            "With drafts: ms per round; an acceptance that is a number is set, and drafting takes "
            "no time."
        )
    read = [row for row in rows if "prompt_peak_ratio" in row]
    if read:
        pieces = " or ".join(f"{size:,}" for size in sorted({row["piece"] for row in read})[::-1])
        ratios = [row["prompt_peak_ratio"] for row in read]
        notes.append(
            f"With a prompt: while its last {pieces} tokens of each sequence are read; "
            f"{min(ratios):.2f} to {max(ratios):.2f} x what the sizes predict."
        )
    return " ".join(
        [
            *notes,
            f"Ceilings in the same run: device copy {top['device_copy'] / 1e12:.2f} TB/s, pinned "
            f"copy {top['link_copy'] / 1e9:.1f} GB/s, gather kernel "
            f"{gather['bytes_per_second'] / 1e9:.1f} GB/s. {about['gpu']}, "
            f"{', '.join(tools(about, 'torch', 'triton', 'transformers'))}, "
            f"{about['date'][:10]}, `{about['command']}`.",
        ]
    )
