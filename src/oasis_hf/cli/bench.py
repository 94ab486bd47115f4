"""`oasis-hf bench`: decode steps on random weights, beside measured ceilings and Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

CASES = ((1, 131072), (8, 32768), (8, 131072), (32, 32768))
ROOM = 512
"""Tokens left free at the end of a context, so that a case never grows its capacity."""


def bench(
    shape: str = typer.Option("llama-3.1-8b", help="A decoder shape; weights are random."),
    arms: str = typer.Option("oasis,dense", help="Of oasis, dense, offloaded."),
    budgets: str = typer.Option("2048", help="Budgets, by commas."),
    indexes: str = typer.Option("keys2bit,minmax", help="Indexes, by commas."),
    policies: str = typer.Option("skip,fetch", help="Miss policies, by commas."),
    prompts: str = typer.Option("", help="Prompt lengths whose time to first token is taken."),
    steps: int = typer.Option(40, help="Decode steps timed per case."),
    quick: bool = typer.Option(False, help="One small case."),
    out: Path | None = typer.Option(None, help="Where the JSON goes."),
) -> None:
    """Measure ceilings, then decode steps; no speed is reported unless the engines agree."""
    import torch

    console = Console()
    if not torch.cuda.is_available():
        console.print(
            "[red]bench needs a CUDA device:[/] got none; run it on a machine with a GPU. "
            "Correctness needs none: pytest tests/test_triton_engine.py"
        )
        raise typer.Exit(2)
    from ..bench import Case, run

    sizes = ((1, 8192),) if quick else CASES
    cases = []
    for batch, tokens in sizes:
        for arm in arms.split(","):
            if arm != "oasis":
                if batch * tokens <= 262144:
                    few = 5 if arm == "offloaded" else 20
                    cases.append(Case(batch, tokens - ROOM, arm, steps=few))
                continue
            for budget in budgets.split(","):
                for index in indexes.split(","):
                    for policy in policies.split(","):
                        options = {
                            "budget": int(budget),
                            "index": index,
                            "on_miss": _policy(policy),
                        }
                        cases.append(Case(batch, tokens - ROOM, arm, options, steps))
    lengths = [int(length) for length in prompts.split(",") if length]

    def report(row: dict[str, Any], record: dict[str, Any]) -> None:
        """Print a row, and keep what there is should the run break off."""
        console.print(line(row), highlight=False)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1) + "\n")

    run(shape, cases, lengths, report)


def _policy(text: str) -> str | float:
    return text if text in ("skip", "fetch") else float(text)


def line(row: dict[str, Any]) -> str:
    """One row of the record, for people."""
    if "ceilings" in row:
        c = row["ceilings"]
        gather = c["gather"]
        return (
            f"ceilings: copy {c['device_copy'] / 1e12:.2f} TB/s, link {c['link_copy'] / 1e9:.1f} "
            f"GB/s, gather {gather['bytes_per_second'] / 1e9:.1f} GB/s "
            f"({gather['bytes_per_second'] / c['link_copy']:.0%}), beside compute "
            f"{gather['beside']:.2f} x the longer"
        )
    if "prompt" in row:
        return (
            f"prompt {row['tokens']:>7,} {row['prompt']:<6} {row['seconds']:6.2f} s to the first "
            f"token, peak {row['peak_hbm_bytes'] / 1e9:.1f} GB"
        )
    name = " ".join(str(value) for value in row["options"].values())
    head = f"B{row['batch']:<3} {row['tokens']:>7,} {row['arm']:<9} {name:<22}"
    if "error" in row:
        return f"{head} {row['error']}"
    text = (
        f"{head} {row['ms_p20']:7.2f} {row['ms_p50']:7.2f} {row['ms_p80']:7.2f} ms/step (p20 p50 "
        f"p80) {row['tokens_per_second']:8.0f} tok/s, floor {row['floor_ms']:6.2f} ms "
        f"(x{row['ratio_to_floor']:.2f}), {row['peak_hbm_bytes'] / 1e9:5.1f} GB"
    )
    if "stats" in row:
        stats = row["stats"]
        text += (
            f", turnover {stats['turnover']:.1%}, hits {stats['hit_rate']:.1%}, "
            f"{row['link_bytes_per_step'] / 1e6:.0f} MB/step over the link"
        )
    return text
