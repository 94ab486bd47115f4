"""Tables of `oasis-hf lookahead`: wanted blocks resident in time, by predictor and cap."""

from __future__ import annotations

from typing import Any

from ..labels import index_label, tools
from ..markdown import table
from ..records import Cells

RUNS = {
    "right": "one token a step; the draft row is the right token",
    "sparse": "the same, all rows attending to a working set",
    "exit-probe": "one token a step; the draft row comes from {exit_layers} of the layers",
    "lookup": "verification of prompt lookup, {drafts} drafts at most",
    "exit": "verification of {drafts} drafts from {exit_layers} of the layers",
}


def lookahead(results: dict[str, Any]) -> str:
    """Recall at equal slots by kind of generation and predictor; then over the cap; per index."""
    rows = [row for row in results["rows"] if row["on_miss"] == "fetch"]
    rows = [row for row in rows if row["head_room"] == 2.0]
    parts = []
    for index in dict.fromkeys(row["index"] for row in rows):
        found = [row for row in rows if row["index"] == index]
        parts.append(_recalls([row for row in found if row["fetch_cap"] in (None, 0.05)], results))
    parts += [_caps(rows), _lookahead_note(results)]
    return "\n\n".join(parts)


def _recalls(rows: Cells, results: dict[str, Any]) -> str:
    columns = list(dict.fromkeys((row["text"], row["budget"]) for row in rows))
    about = results["about"]["recordings"][0]
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        here = [row for row in rows if row["run"] == run]
        rates = {row["text"]: row["acceptance"] for row in here}
        title = RUNS[run].format(**about)
        if any(rates.values()):
            title += ", accepted " + ", ".join(f"{x}: {rate:.0%}" for x, rate in rates.items())
        for predictor, cap in _arms_in_order(here):
            cells = {
                (row["text"], row["budget"]): _recall(row)
                for row in here
                if (row["predictor"], row["fetch_cap"]) == (predictor, cap)
            }
            name = f"`{predictor}`" + ("" if cap is None else f", cap {cap:g}")
            lines.append([title, name, *(cells.get(column, "") for column in columns)])
            title = ""
    header = ["generation", "fetched ahead by", *(f"{t}, {budget:,}" for t, budget in columns)]
    ranked = index_label(rows[0]["index"])
    title = f"Wanted blocks resident in time, percent: blocks ranked by {ranked}."
    return title + "\n\n" + table(header, lines, 2)


def _arms_in_order(rows: Cells) -> list[tuple[str, float | None]]:
    """Predictors and caps: LRU, then those without a cap, then those with the default one."""
    found = dict.fromkeys((row["predictor"], row["fetch_cap"]) for row in rows)
    return sorted(found, key=lambda arm: (arm[0] != "lru", arm[1] is not None))


def _recall(row: dict[str, Any]) -> str:
    mean, p5 = f"{100 * row['recall']:.1f}", f"{100 * row['recall_p5']:.0f}"
    if row["predictor"] == "lru":
        return f"{mean} ({p5})"
    low, high = (100 * part for part in row["over_lru"][1:])
    return f"{mean} ({p5}) [{low:+.1f}, {high:+.1f}]"


def _caps(rows: Cells) -> str:
    """Recall, attention and bytes over the cap, for the predictors that were swept."""
    swept = [row for row in rows if row["fetch_cap"] not in (None, 0.05)]
    arms = list(dict.fromkeys((row["text"], row["run"], row["predictor"]) for row in swept))
    lines = []
    for budget in sorted({row["budget"] for row in swept}):
        for text, run, predictor in arms:
            found = [
                row
                for row in rows
                if (row["text"], row["run"], row["predictor"]) == (text, run, predictor)
                and (row["budget"], row["index"]) == (budget, swept[0]["index"])
            ]
            found.sort(key=lambda row: 2.0 if row["fetch_cap"] is None else row["fetch_cap"])
            cells = (
                f"{100 * row['recall']:.1f} / {100 * row['mass']:.1f} / "
                f"{row['ahead_bytes'] / 1e3:,.0f} + {row['now_bytes'] / 1e3:,.0f}"
                for row in found
            )
            lines.append([f"{text}, {run}, `{predictor}`", f"{budget:,}", *cells])
    caps = ["0.01", "0.02", "0.05", "0.1", "0.2", "none"]
    title = (
        "By `fetch_cap`: percent resident in time / percent of the attention that these and the "
        "tail hold / kB a committed token, ahead + before attention."
    )
    return title + "\n\n" + table(["generation, predictor", "budget", *caps], lines, 2)


def _lookahead_note(results: dict[str, Any]) -> str:
    about, first = results["about"], results["about"]["recordings"][0]
    return (
        "Mean over rounds, layers and heads (5th percentile over rounds and layers) [95 % interval "
        "of the difference to `lru`, bootstrap over 8 rounds in a row]. All have twice the budget "
        "in slots; columns are text and budget. `last` equals `lru` where each step is one token: "
        f"what it asks for is there. {first['model']}, {first['dtype']}, {first['context']:,} "
        f"tokens read densely, {first['following']} decoded. `{about['command']}`, "
        f"{about['date']}: Python {about['python']}, "
        f"{', '.join(tools(about, 'torch', 'transformers'))}, CPU."
    )
