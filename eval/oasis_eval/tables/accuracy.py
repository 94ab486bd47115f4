"""The table of a run of `oasis-hf eval`: scores over all tasks, by arm and budget."""

from __future__ import annotations

import re
from typing import Any

from oasis_hf.config import BLOCK

from ..labels import index_label, index_order, miss_label, tools
from ..markdown import table
from ..records import OVERALL, Cells, reads_tf32

SHOWN = re.compile(
    r"(?P<index>[^/]+)/(?P<miss>[^/]+)/(?P<budget>\d+)(?:/block_size=(?P<block>\d+))?"
)
"""Arms that the table has; those with other options are in the report."""


def accuracy(results: dict[str, Any]) -> str:
    """Scores over all tasks and differences to dense, by arm and budget, for each context."""
    cells = [cell for cell in results["scores"] if cell["task"] == OVERALL]
    tasks = list(dict.fromkeys(c["task"] for c in results["scores"] if c["task"] != OVERALL))
    contexts = dict.fromkeys(cell["context"] for cell in cells)
    parts = [
        _accuracies([cell for cell in cells if cell["context"] == context], tasks)
        for context in contexts
    ]
    return "\n\n".join([*parts, _accuracy_note(results["about"])])


def _accuracies(cells: Cells, tasks: list[str]) -> str:
    """One context: a row for each index, size of blocks and policy, a column for each budget."""
    dense = next(cell for cell in cells if cell["arm"] == "dense")
    found: dict[tuple[str, str, int], dict[int, str]] = {}
    for cell in cells:
        shown = SHOWN.fullmatch(cell["arm"])
        if shown:
            row = shown["index"], shown["miss"], int(shown["block"] or BLOCK)
            found.setdefault(row, {})[int(shown["budget"])] = _score(cell)
    sizes = {block for _, _, block in found}
    arms = sorted(found, key=lambda arm: (index_order(arm[0]), arm[1] == "skip", -arm[2]))
    budgets = sorted({budget for cells in found.values() for budget in cells})
    lines = (
        [
            index_label(index),
            *([f"{block}"] if len(sizes) > 1 else []),
            miss_label(miss),
            *(found[index, miss, block].get(budget, "") for budget in budgets),
        ]
        for index, miss, block in arms
    )
    header = ["blocks ranked by", *(["of tokens"] if len(sizes) > 1 else []), "a missing block is"]
    names = ", ".join(f"`{task}`" for task in tasks)
    title = (
        f"**{dense['context']:,} tokens**: percent right over {names}; dense attention "
        f"{100 * dense['mean']:.1f} ({100 * dense['low']:.0f} to {100 * dense['high']:.0f})."
    )
    return title + "\n\n" + table([*header, *(f"{b:,}" for b in budgets)], lines, 2)


def _accuracy_note(about: dict[str, Any]) -> str:
    tf32 = " (prompts read in TF32)" if reads_tf32(about) else ""
    return (
        f"In brackets: the difference to dense attention on the same samples, with its 95 % "
        f"bootstrap interval. {about['config']['samples']} samples a task, text "
        f"'{about['text']}'. {about['model']}, {about['dtype']}{tf32}, greedy; {about['device']}, "
        f"{', '.join(tools(about, 'torch', 'transformers'))}, {about['date']}."
    )


def _score(cell: dict[str, Any]) -> str:
    change = {name: 100 * cell["change"][name] for name in ("mean", "low", "high")}
    return f"{100 * cell['mean']:.1f} ({{mean:+.1f}}: {{low:+.0f}} to {{high:+.0f}})".format(
        **change
    )
