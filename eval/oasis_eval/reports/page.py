"""The files of a finished run: summary.json, report.md and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..arms import is_peer
from ..markdown import table
from ..records import (
    OVERALL,
    SUMMARY,
    Cells,
    Record,
    grouped,
    load_run,
    reads_tf32,
    write_json,
)
from .summary import SELECTION, summarise


def write_report(folder: Path) -> Path:
    """Writes the summary, the plots (where matplotlib is) and the report; returns the report."""
    about, records = load_run(folder)
    summary = summarise(records)
    write_json(folder / SUMMARY, {"about": about} | summary)
    plots = _plots(folder, about, records, summary["scores"])
    page = folder / "report.md"
    page.write_text(render(about, records, summary, plots), encoding="utf-8")
    return page


def _plots(folder: Path, about: dict[str, Any], records: list[Record], cells: Cells) -> list[str]:
    try:
        from ..plots.of_run import draw
    except ImportError:
        return []
    return draw(folder, about, records, cells)


def render(
    about: dict[str, Any], records: list[Record], summary: dict[str, Any], plots: list[str]
) -> str:
    """The report in Markdown."""
    parts = [f"# {about['model']}: sparse beside dense attention", note(about, records)]
    for context, cells in grouped(summary["scores"], "context").items():
        parts += [f"## {context:,} tokens", scores_table(cells)]
        parts += ["Against dense attention, on the same samples:", changes_table(cells)]
    if summary["fidelity"]:
        parts += ["## Fidelity on real text, teacher-forced", fidelity_table(summary["fidelity"])]
        parts.append(
            "Loss and KL in nats per token. Agreement: share of the tokens whose most likely "
            "successor is that of dense attention. Mass: share of the attention that the chosen "
            "blocks and the tail hold, mean and worst layer. Recall: share of the truly best "
            "blocks that were attended to, over layers, KV heads and steps."
        )
    for context, cells in grouped(summary["drift"], "context").items():
        parts += [f"## Long outputs, {context:,} tokens with the prompt", drift_table(cells)]
        parts.append(drift_note(cells))
    parts += [f"![{Path(name).stem}]({name})" for name in plots]
    return "\n\n".join(parts) + "\n"


def note(about: dict[str, Any], records: list[Record]) -> str:
    """Where and with what it was made, and how to read it."""
    config = about["config"]
    machine = about["device"] if about["device"] != "cpu" else f"{about['cpus']}-core CPU"
    seconds = sum(record["seconds"] for record in records if not is_peer(record["arm"]))
    read = sum(
        found[0]["reading"] for found in grouped(records, "task", "context", "number").values()
    )
    together = max(record.get("rows", 1) for record in records)
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"{config['samples']} samples of each task and context, seed {config['seed']}, "
        f"text '{about['text']}'. Prompts are "
        f"read densely and once{', in TF32' if reads_tf32(about) else ''}; from their last "
        f"token on every arm continues them for itself, up to {together} samples at once. "
        "Scores are percent with 95 % bootstrap intervals over samples; an interval of no width "
        "says that all samples scored the same, not that others would. INDEX/MISS/BUDGET names an "
        f"arm, budgets in tokens per KV head. {about['dtype']}, {machine}, {about['threads']} "
        f"threads, {seconds / 60:.1f} minutes of answers and {read / 60:.1f} of reading; "
        f"{about['date']}, commit {about['commit']}, Python {about['python']}, {versions}."
        + (f" Note: {about['note']}." if "note" in about else "")
        + (_peers(about["peers"]) if "peers" in about else "")
    )


def _peers(about: dict[str, Any]) -> str:
    """How arms of another library are named, and what they ran with."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        "\n\nLIBRARY-METHOD/TOKENS names an arm of another library that reads the same ids, all of "
        "the prompt but its last token, keeps so many tokens per KV head and evicts the others for "
        f"good; {about['date']}, {versions}."
    )


def scores_table(cells: Cells) -> str:
    """Percent right with intervals: a row for each arm, a column for each task."""
    tasks = list(grouped(cells, "task"))
    rows = [
        [f"`{arm}`", *(_estimate(_at(found, task)) for task in tasks)]
        for arm, found in grouped(cells, "arm").items()
    ]
    return table(["arm", *tasks], rows)


def changes_table(cells: Cells) -> str:
    """Paired differences, what is equal to dense, and what moved; a row for each sparse arm."""
    tasks = list(grouped(cells, "task"))
    rows = []
    # Runs of older releases did not count it.
    with_memory = any("hbm_bytes" in cell for cell in cells)
    for arm, found in grouped(cells, "arm").items():
        if not any("change" in cell for cell in found):
            continue
        costs = found[-1]
        same = [cell["same"] for cell in found if "same" in cell]
        rows.append(
            [
                f"`{arm}`",
                *(_change(_at(found, task)) for task in tasks),
                f"{sum(same) / len(same):.0%}" if same else "",
                *(_cost(costs, name, ".1%") for name in ("hit_rate", "fetched_now", "turnover")),
                _cost(costs, "attended", ",.0f"),
                _cost(costs, "bytes_per_step", ".2f", 1e-6, " MB"),
                *([_cost(costs, "hbm_bytes", ".1f", 1e-6, " MB")] if with_memory else []),
            ]
        )
    header = ["arm", *tasks, "same answers", "hits", "fetched before", "turnover", "attended"]
    return table([*header, "moved per step", *(["fast memory"] if with_memory else [])], rows)


def _cost(cell: dict[str, Any], name: str, form: str, scale: float = 1, unit: str = "") -> str:
    """What a cache counted; nothing where it counts no such thing."""
    return f"{cell[name] * scale:{form}}{unit}" if name in cell else ""


def fidelity_table(cells: Cells) -> str:
    """A row for each arm and context."""
    header = ["context", "arm", "loss", "change of loss", "KL", "agreement", "first divergence"]
    rows = []
    for cell in cells:
        change = cell.get("change")
        row = [f"{cell['context']:,}", f"`{cell['arm']}`", f"{cell['mean']:.4f}"]
        row.append(
            f"{change['mean']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})"
            if change
            else ""
        )
        row += [f"{cell['kl']:.4f}", f"{cell['agreement']:.1%}"] if "kl" in cell else ["", ""]
        row.append(f"{cell['first_divergence']:.0f}" if "first_divergence" in cell else "")
        row += [f"{cell[name]:.3f}" if name in cell else "" for name in SELECTION]
        rows.append([*row, _cost(cell, "hbm_bytes", ".1f", 1e-6, " MB")])
    header += ["mass", "worst layer", "recall", "5th percentile", "minimum", "fast memory"]
    return table(header, rows)


def drift_note(cells: Cells) -> str:
    """How to read the table of long outputs."""
    steps, count = cells[0]["steps"], max(cell["count"] for cell in cells)
    window = f"{steps // len(cells[0]['kl']):,}"
    return (
        f"{count} samples. Dense attention continued a text by {steps:,} sampled tokens; every arm "
        "was led along these, one token a step, and then continued the text itself with the same "
        "random numbers. KL from dense and loss in nats per token, agreement of the most likely "
        f"tokens, each over the first and the last {window} tokens; their slopes per 1,000 tokens, "
        "and paired differences to dense, with 95 % bootstrap intervals over samples. Fresh: the "
        "KL over the last tokens where all before them was read densely, so that no earlier step "
        "left anything out; accumulated: what the KL there is more. A slope also has the context "
        "that outgrows the budget; an accumulation whose interval holds 0 is none. Own output: its "
        "loss under dense attention less that of dense's own, the median token at which it parts "
        "from dense's, and the share of its 4-grams that are distinct. dense/DTYPE is dense "
        "attention in another rounding, which also read the prompt in it: the scale."
    )


def drift_table(cells: Cells) -> str:
    """A row for each arm of long outputs."""
    rows = []
    for cell in cells:
        row = [f"`{cell['arm']}`", f"{np.mean(cell['loss']):.4f}"]
        if "change" not in cell:
            fresh = [f"{cell['fresh_kl']:.2g}" if "fresh_kl" in cell else ""]
            rows.append([*row, *[""] * 4, *fresh, *[""] * 6, f"{cell['distinct']:.1%}"])
            continue
        agreement = [100 * cell["agreement"][place] for place in (0, -1)]
        row += [_interval(cell["change"])]
        row += [
            f"{cell['kl'][0]:.2g}",
            f"{cell['kl'][-1]:.2g}",
            _interval(cell["kl_slope"], "+.2g"),
            f"{cell['fresh_kl']:.2g}" if "fresh_kl" in cell else "",
            _interval(cell["accumulated"], "+.2g") if "accumulated" in cell else "",
        ]
        row += [*(f"{share:.1f}" for share in agreement)]
        row += [_interval(cell["agreement_slope"], "+.2f", 100)]
        row += [_interval(cell["free_change"]), f"{cell['parted']:,.0f}", f"{cell['distinct']:.1%}"]
        rows.append(row)
    header = ["arm", "loss", "change", "KL, first", "last", "slope", "last, fresh", "accumulated"]
    header += ["agreement %, first", "last", "slope"]
    return table([*header, "own output: loss", "parts at", "distinct"], rows)


def _interval(found: dict[str, float], form: str = "+.4f", scale: float = 1) -> str:
    mean, low, high = (f"{scale * found[name]:{form}}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _at(cells: Cells, task: str) -> dict[str, Any] | None:
    return next((cell for cell in cells if cell["task"] == task), None)


def _estimate(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    text = f"{100 * cell['mean']:.0f} ({100 * cell['low']:.0f}-{100 * cell['high']:.0f})"
    return f"**{text}**" if cell["task"] == OVERALL else text


def _change(cell: dict[str, Any] | None) -> str:
    if cell is None or "change" not in cell:
        return ""
    change = {name: 100 * cell["change"][name] for name in ("mean", "low", "high")}
    return "{mean:+.0f} ({low:+.0f} to {high:+.0f})".format(**change)
