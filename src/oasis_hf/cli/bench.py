"""`oasis-hf bench`: decode steps on random weights, beside measured ceilings and Transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ..config import DEFAULT_CAP, OasisConfig


def bench(
    shape: str = typer.Option(
        "llama-3.1-8b",
        help="A decoder's sizes: llama-3.1-8b, qwen3-8b, qwen3-0.6b, a Hub id or a folder with a "
        "config.json; weights are random.",
    ),
    arms: str = typer.Option(
        "oasis,dense,static,offloaded",
        help="Oasis, and Transformers' caches: DynamicCache, StaticCache in a CUDA graph, and "
        "offloaded.",
    ),
    budgets: str = typer.Option("2048,512", help="Budgets; the first is that of the base case."),
    indexes: str = typer.Option("keys2bit,minmax", help="Indexes, the base case's first."),
    policies: str = typer.Option("skip,fetch", help="Miss policies, the base case's first."),
    block_sizes: str = typer.Option(
        str(OasisConfig.block_size),
        help="Tokens per block, or auto; the base case's first, the others with every budget and "
        "policy.",
    ),
    caps: str = typer.Option(
        f"{DEFAULT_CAP:g}",
        help=f"Values of fetch_cap: shares, none, auto, or 0 for no lookahead; the base case has "
        f"{DEFAULT_CAP:g} if that is one of them.",
    ),
    compiles: str = typer.Option(
        "off,on", "--compile", help="Compile the model's own work: off, on, or both."
    ),
    prompts: str = typer.Option("", help="Prompt lengths whose time to first token is taken."),
    profile: bool = typer.Option(False, help="Profile the kernels of each base case."),
    drafts: int = typer.Option(0, help="Drafts that a round verifies, beside plain decoding."),
    acceptance: str = typer.Option(
        "0.6,0.8,0.95",
        help="Probabilities that a draft is accepted, which are set, not found; or lookup: drafts "
        "are looked up in a scripted text, and accepted where it goes on as they do.",
    ),
    heat: float | None = typer.Option(
        None, help="How alike the choices of one step and the next are, 4 by default; 1 is little."
    ),
    steps: int = typer.Option(40, help="Decode steps timed per case.", min=1),
    sizes: str = typer.Option(
        "", help="Sequences x tokens of context of each, such as 1x131072,8x32768; four by default."
    ),
    quick: bool = typer.Option(False, help="One small size."),
    out: Path | None = typer.Option(None, help="Where the JSON goes."),
) -> None:
    """Measure ceilings, then decode steps; no speed is reported unless the engines agree.

    The first value of each option makes the base case of a size; every other value is measured as
    one change to it. Further budgets are measured at the first size only. With cap 0 among --caps,
    rows say how much of their background fetches shows in the time of a step.
    """
    import torch

    from ..bench import Choices, plan, run
    from ..bench.plan import LOOKUP, QUICK, SIZES
    from ..bench.workload import shape_sizes

    try:
        shape_sizes(shape)
        choices = Choices(
            budgets=tuple(int(budget) for budget in _words(budgets)),
            indexes=tuple(_words(indexes)),
            policies=tuple(_policy(policy) for policy in _words(policies)),
            caps=tuple(_cap(cap) for cap in _words(caps)),
            compile=tuple(_switch(word) for word in _words(compiles)),
            block_sizes=tuple(_block(word) for word in _words(block_sizes)),
        )
        shares = [share if share == LOOKUP else float(share) for share in _words(acceptance)]
        if quick and sizes:
            raise ValueError("sizes: got some beside --quick, which is one size; leave one out")
        usual = QUICK if quick else SIZES
        chosen = [_batch_and_context(size) for size in _words(sizes)] or usual
        cases = plan(chosen, _words(arms), choices, steps, drafts, shares)
        if heat is not None:
            cases = [replace(case, heat=heat) for case in cases]
        lengths = [int(length) for length in _words(prompts)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    console = Console()
    if not torch.cuda.is_available():
        console.print(
            "[red]bench needs a CUDA device:[/] got none; run it on a machine with a GPU. "
            "Correctness needs none: pytest tests/test_triton_engine.py"
        )
        raise typer.Exit(2)

    def report(row: dict[str, Any], record: dict[str, Any]) -> None:
        """Print a row, and keep what there is should the run break off."""
        console.print(line(row), highlight=False, markup=False, soft_wrap=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1) + "\n")

    run(shape, cases, lengths, report, profile)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _policy(text: str) -> str | float:
    return text if text in ("skip", "fetch") else float(text)


def _block(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _cap(text: str) -> str | float | None:
    if text in ("none", "auto"):
        return None if text == "none" else text
    try:
        return float(text)
    except ValueError as error:
        message = f"caps: got {text!r}, expected none, auto or a share such as 0.05"
        raise ValueError(message) from error


def _batch_and_context(text: str) -> tuple[int, int]:
    from ..bench.plan import ROOM

    batch, _, context = text.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context) > ROOM):
        raise ValueError(
            f"sizes: got {text!r}, expected sequences and tokens of context, more than {ROOM}, "
            "such as 8x131072"
        )
    return int(batch), int(context)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"compile: got {text!r}, expected off, on or off,on")
    return text == "on"


def line(row: dict[str, Any]) -> str:
    """One row of the record, for people; several lines if it has a profile."""
    if "ceilings" in row:
        return _ceilings(row["ceilings"])
    if "prompt" in row:
        return _prompt(row)
    if "arm" not in row:
        return _examined(row)
    options = row["options"]
    apart = ("compile", "fetch_cap", "block_size")
    words = [str(v) for name, v in options.items() if name not in apart]
    if "block_size" in options:
        words.append(f"block {options['block_size']}")
    if options.get("fetch_cap", DEFAULT_CAP) != DEFAULT_CAP:
        words.append(f"cap {str(options['fetch_cap']).lower()}")
    if options.get("compile"):
        words.append("compiled")
    if row.get("drafts"):
        words.append(f"{row['drafts']} drafts at {row['acceptance']}")
    head = f"{_size(row)} {row['arm']:<9} {' '.join(words):<28}"
    if "error" in row:
        return f"{head} {row['error']}"
    text = (
        f"{head} {row['ms_p20']:7.2f} {row['ms_p50']:7.2f} {row['ms_p80']:7.2f} ms/step (p20 p50 "
        f"p80) {row['tokens_per_second']:8.0f} tok/s, floor {row['floor_ms']:6.2f} ms "
        f"(x{row['ratio_to_floor']:.2f}), {_gigabytes(row['peak_hbm_bytes'])}"
    )
    if "accepted_share" in row:
        text += (
            f", {row['accepted_share']:.0%} accepted, {row['tokens_per_round']:.2f} tokens a round"
        )
    if "stats" in row:
        stats = row["stats"]
        text += (
            f", turnover {stats['turnover']:.1%}, hits {stats['hit_rate']:.1%}, "
            f"{row['link_bytes_per_step'] / 1e6:.0f} MB/step over the link"
        )
    if "overlap" in row:
        text += f", exposed {row['exposed_ms']:.2f} ms, overlap {row['overlap']:.2f}"
    return f"{text}, warm-up {row['warm_up_seconds']:.1f} s"


def _size(row: dict[str, Any]) -> str:
    return f"B{row['batch']:<3} {row['tokens']:>7,}"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:5.1f} GB"


def _ceilings(ceilings: dict[str, Any]) -> str:
    gather = ceilings["gather"]
    return (
        f"ceilings: copy {ceilings['device_copy'] / 1e12:.2f} TB/s, link "
        f"{ceilings['link_copy'] / 1e9:.1f} GB/s, gather "
        f"{gather['bytes_per_second'] / 1e9:.1f} GB/s "
        f"({gather['bytes_per_second'] / ceilings['link_copy']:.0%}), beside compute "
        f"{gather['beside']:.2f} x the longer"
    )


def _prompt(row: dict[str, Any]) -> str:
    size = row["prefill_chunk_size"]
    pieces = "at once" if size is None else f"in pieces of {size:,}"
    head = f"prompt {row['tokens']:>7,} {row['prompt']:<6} {row['run']:<6} {pieces},"
    if "error" in row:
        return f"{head} {row['error']}"
    peak = _gigabytes(row["peak_hbm_bytes"])
    return f"{head} {row['seconds']:6.2f} s to the first token, peak {peak}"


def _examined(row: dict[str, Any]) -> str:
    """The memory of the last piece of a prompt, and the profile as a table."""
    text = f"{_size(row)} last {row['piece']:,} tokens of a prompt: "
    if "prompt_error" in row:
        text += row["prompt_error"]
    else:
        peak = _gigabytes(row["prompt_peak_hbm_bytes"]).strip()
        text += f"peak {peak}, {row['prompt_peak_ratio']:.2f} x predicted"
    kernels = [
        f"  {kernel['us']:9.1f} us {kernel['calls']:7.1f} calls {kernel['share']:6.1%}  "
        f"{kernel['name'][:80]}"
        for kernel in row.get("profile", ())
    ]
    return "\n".join([text, *kernels])
