"""Prints the tables of the pages of results, or checks that they are there.

python eval/tables.py needles            # print
python eval/tables.py needles --write    # put it between its markers in the page
python eval/tables.py needles --check    # fail if the page has anything else there
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from summary import wilson

from oasis_eval.summary import OVERALL, reads_tf32
from oasis_hf.config import BLOCK, DEFAULT_CAP

FOLDER = Path(__file__).parent
PAGES = {
    name: FOLDER.parent / "docs" / "results" / f"{page}.md"
    for page, names in {
        "accuracy": ("needles", "smollm2-8k", "retrieval"),
        "speed": ("bench",),
        "background-fetches": ("bench-caps", "bench-caps-32"),
        "drafts": ("bench-drafts",),
        "lookahead": ("lookahead",),
        "indexes": ("needles-mass", "smollm2-blocks", "bench-blocks"),
    }.items()
    for name in names
}
"""The page of each table."""
LABELS = {
    "keys2bit": "2-bit keys (`keys2bit`)",
    "minmax": "min/max of a block (`minmax`)",
    "oracle": "true attention (`oracle`)",
    "mean": "mean key (`mean`)",
    "streaming": "none: newest blocks (`streaming`)",
}
CACHES = {
    "dense": "DynamicCache",
    "static": "StaticCache, CUDA graph",
    "offloaded": "DynamicCache, offloaded",
}
SOURCES = {"bench-drafts": "bench-lookahead"}
"""Results of the tables that are not called like their file."""

MISSES = {"fetch": "fetched", "skip": "skipped"}
Cells = list[dict[str, Any]]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; every column after the first two is aligned right."""
    header = list(header)
    rule = ["---" if place < 2 else "--:" for place in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def needles(results: dict[str, Any]) -> str:
    """Hits by index, policy and budget, a table for each context; then what was fetched."""
    parts = []
    for dense in results["dense"]:
        cells = [cell for cell in results["cells"] if cell["context"] == dense["context"]]
        if cells:
            parts += [_hits(dense, cells), _moved(cells)]
    return "\n\n".join([*parts, _note(results)])


def _hits(dense: dict[str, Any], cells: Cells) -> str:
    count = max(cell["of"] for cell in cells)
    title = (
        f"**{dense['context']:,} tokens**: needles answered, of {count} that dense attention "
        f"answers (it answers {dense['hits']} of {dense['of']})."
    )
    header = ["blocks ranked by", "a missing block is", "index bits"]
    rows = (
        [LABELS.get(index, index), _miss(on_miss), _bits(found[0])]
        + [
            _cell(found, budget, lambda cell: f"{cell['hits']}/{cell['of']}")
            for budget in _budgets(cells)
        ]
        for (index, on_miss), found in _arms(cells).items()
    )
    return title + "\n\n" + table(header + [f"{b:,}" for b in _budgets(cells)], rows)


def _moved(cells: Cells) -> str:
    title = (
        "Of the wanted blocks, percent fetched before attention + percent fetched behind it "
        "(the others were resident, or left out):"
    )
    rows = (
        [LABELS.get(index, index), _miss(on_miss)]
        + [
            _cell(found, b, lambda cell: f"{cell['fetched_now']:.1%} + {cell['admitted']:.1%}")
            for b in _budgets(cells)
        ]
        for (index, on_miss), found in _arms(cells).items()
        if index == "keys2bit"
    )
    header = ["blocks ranked by", "a missing block is"]
    return title + "\n\n" + table(header + [f"{b:,}" for b in _budgets(cells)], rows)


def _budgets(cells: Cells) -> list[int]:
    return sorted({cell["budget"] for cell in cells})


def _arms(cells: Cells) -> dict[tuple[str, str], Cells]:
    """Cells by index and policy, in the order of `LABELS`, fetching first."""
    keys = {(cell["index"], cell["on_miss"]) for cell in cells}
    order = list(LABELS)
    ranked = sorted(
        keys, key=lambda key: (order.index(key[0]), key[1] == "skip", key[1] != "fetch")
    )
    return {
        key: [cell for cell in cells if (cell["index"], cell["on_miss"]) == key] for key in ranked
    }


def _cell(cells: Cells, budget: int, show: Callable[[dict[str, Any]], str]) -> str:
    return next((show(cell) for cell in cells if cell["budget"] == budget), "")


def _miss(on_miss: str) -> str:
    return MISSES.get(on_miss, f"fetched above a share of {on_miss}")


def _bits(cell: dict[str, Any]) -> str:
    return f"{cell['bits']:g}"


def _note(results: dict[str, Any]) -> str:
    about = results["about"]
    count = max((cell["of"] for cell in results["cells"]), default=0)
    shown = sorted({count, count - 1, count // 2}, reverse=True) if count > 1 else [count]
    ranges = ", ".join(
        "{}/{} {:.0f}-{:.0f} %".format(hits, count, *(100 * x for x in wilson(hits, count)))
        for hits in shown
    )
    machine = about["device"] if about["device"] != "cpu" else f"{about['cpus']}-core CPU"
    return (
        f"95 % intervals (Wilson): {ranges}. {about['model']}, {about['dtype']}, greedy; prompts "
        "are read densely, every decoded token attends sparsely. Budgets are tokens per KV head, "
        "beside the tail of the newest ones. Index bits are per key element at 16 bits. "
        f"`{about['command']}` at {about['commit']}, {about['date']}: Python {about['python']}, "
        f"torch {about['torch']}, Transformers {about['transformers']}, {machine}."
    )


def bench(results: dict[str, Any]) -> str:
    """Milliseconds per decode step, beside the floor and Transformers' own caches; prompts."""
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
            _size(row),
            cache_name(row, budget),
            *(f"{row[key]:.2f}" for key in ("ms_p20", "ms_p50", "ms_p80")),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ratio_to_floor']:.2f}",
            _beside_dense(row, dense.get((row["batch"], row["tokens"]))),
            _gigabytes(row["peak_hbm_bytes"]),
        ]
        if with_prompts:
            peak = row.get("prompt_peak_hbm_bytes")
            cells.append("" if peak is None else _gigabytes(peak))
        lines.append(cells)
    parts = [table(header, lines), _prompts(results.get("prompts", [])), _bench_note(results, rows)]
    return "\n\n".join(part for part in parts if part)


def cache_name(row: dict[str, Any], budget: int) -> str:
    """What decodes in a row of the bench; an Oasis budget is named where it is not `budget`."""
    if row["arm"] != "oasis":
        return CACHES[row["arm"]]
    options = row["options"]
    words = ["oasis", f"`{options['index']}`", str(options["on_miss"])]
    if options["budget"] != budget:
        words.append(f"budget {options['budget']:,}")
    if cap_of(row) != DEFAULT_CAP:
        words.append(f"cap {_cap_name(cap_of(row))}")
    if options.get("compile"):
        words.append("compiled")
    if row.get("drafts"):
        words.append(f"{row['drafts']} drafts accepted at {row['acceptance']}")
    return ", ".join(words)


def cap_of(row: dict[str, Any]) -> str | float | None:
    """The `fetch_cap` of an Oasis row; older results do not name the only one there was."""
    cap: str | float | None = row["options"].get("fetch_cap", DEFAULT_CAP)
    return cap


def _cap_name(cap: str | float | None) -> str:
    return "none" if cap is None else str(cap) if isinstance(cap, str) else f"{cap:g}"


def _beside_dense(row: dict[str, Any], dense: float | None) -> str:
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
    return table(["prompt", "cache", "tokens a piece", "first token after", "peak HBM"], lines)


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
            f"{gather['bytes_per_second'] / 1e9:.1f} GB/s. {about['gpu']}, torch {about['torch']}, "
            f"triton {about['triton']}, Transformers {about['transformers']}, "
            f"{about['date'][:10]}, `{about['command']}`.",
        ]
    )


def bench_caps(results: dict[str, Any]) -> str:
    """What background fetches cost, by size and cap; misses fetched before attention beside it."""
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
            _size(row),
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
        "Blocks: fetched behind a step at most, per head. Hits: wanted blocks that are resident "
        "when a step begins. Link ms: these bytes at the rate of a pinned copy. Exposed: the step "
        "beyond that of cap 0, which fetches nothing. Overlap: the step over the longer of that "
        f"one and its link ms. {_bench_machine(results)}"
    )
    return "\n\n".join([table([*header, "overlap"], lines), note])


def bench_blocks(results: dict[str, Any]) -> str:
    """Milliseconds per decode step over the size of blocks, by size, budget and policy."""
    rows = _oasis_rows(results)
    blocks = list(dict.fromkeys(row["options"]["block_size"] for row in rows))
    cases: dict[tuple[str, int, str], dict[int, str]] = {}
    for row in sorted(rows, key=lambda row: _place(row, rows)):
        options = row["options"]
        case = (_size(row), options["budget"], options["on_miss"])
        shown = f"{row['ms_p50']:.2f} ({100 * row['stats']['hit_rate']:.1f} %)"
        cases.setdefault(case, {})[options["block_size"]] = shown
    lines = (
        [size, f"{budget:,}", _miss(miss), *(found.get(block, "") for block in blocks)]
        for (size, budget, miss), found in cases.items()
    )
    header = ["case", "budget", "a missing block is", *(f"blocks of {block}" for block in blocks)]
    note = (
        "Milliseconds per step, median (percent of the wanted blocks that are resident when it "
        f"begins). {_bench_machine(results)}"
    )
    return "\n\n".join([table(header, lines), note])


def bench_drafts(results: dict[str, Any]) -> str:
    """Tokens per second of rounds with drafts, beside plain steps of the same options."""
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
                _size(alone),
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
    return "\n\n".join([table(header, lines), note])


def _sped_up(row: dict[str, Any], plain: dict[str, Any]) -> str:
    speed = row["tokens_per_second"]
    return f"{speed:,.0f} ({speed / plain['tokens_per_second']:.2f} x)"


def _oasis_rows(results: dict[str, Any]) -> Cells:
    return [row for row in results["rows"] if row["arm"] == "oasis" and "error" not in row]


def _size(row: dict[str, Any]) -> str:
    return f"B{row['batch']}, {round(row['tokens'] / 1024)}K"


def _place(row: dict[str, Any], rows: Cells) -> int:
    """Where the size of a row comes among those of `rows`, which keep their order."""
    sizes = list(dict.fromkeys((other["batch"], other["tokens"]) for other in rows))
    return sizes.index((row["batch"], row["tokens"]))


def _by_cap(row: dict[str, Any]) -> tuple[bool, int, float]:
    """Numbers first, in order; then no limit, auto, and what is fetched before attention."""
    cap = cap_of(row)
    number = isinstance(cap, int | float)
    fetched = row["options"]["on_miss"] == "fetch"
    return fetched, 0 if number else 1 if cap is None else 2, float(cap) if number else 0.0


def _policy(row: dict[str, Any]) -> str:
    """What is done about misses: a cap, as they are skipped, or another policy."""
    miss, cap = row["options"]["on_miss"], cap_of(row)
    if miss == "fetch":
        return "fetched before attention"
    text = "0, no lookahead" if cap == 0 else _cap_name(cap)
    return text if miss == "skip" else f"{text}, {_miss(miss)}"


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
        f"{about['gpu']}, torch {about['torch']}, triton {about['triton']}, Transformers "
        f"{about['transformers']}, {about['date'][:10]}, `{about['command']}`."
    )


def mass(results: dict[str, Any]) -> str:
    """Share of the true attention held, mean and worst layer, by choice and budget."""
    found: dict[str, dict[int, str]] = {}
    for row in results["choices"]:
        cell = f"{row['mean']:.3f} ({row['worst']:.2f})"
        found.setdefault(row["changes"], {})[row["budget"]] = cell
    budgets = sorted({budget for cells in found.values() for budget in cells})
    lines = ([name, *(cells.get(b, "") for b in budgets)] for name, cells in found.items())
    return table(["choice", *(f"{b:,}" for b in budgets)], lines)


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
        index, _, rest = cell["arm"].partition("/")
        miss, _, rest = rest.partition("/")
        budget, _, options = rest.partition("/block_size=")
        if budget.isdecimal():
            block = int(options or BLOCK)
            found.setdefault((index, miss, block), {})[int(budget)] = _score(cell)
    order, sizes = list(LABELS), {block for _, _, block in found}
    arms = sorted(found, key=lambda arm: (order.index(arm[0]), arm[1] == "skip", -arm[2]))
    budgets = sorted({budget for cells in found.values() for budget in cells})
    lines = (
        [
            LABELS[index],
            *([f"{block}"] if len(sizes) > 1 else []),
            _miss(miss),
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
    return title + "\n\n" + table([*header, *(f"{b:,}" for b in budgets)], lines)


def _accuracy_note(about: dict[str, Any]) -> str:
    tf32 = " (prompts read in TF32)" if reads_tf32(about) else ""
    return (
        f"In brackets: the difference to dense attention on the same samples, with its 95 % "
        f"bootstrap interval. {about['config']['samples']} samples a task, text "
        f"'{about['text']}'. {about['model']}, {about['dtype']}{tf32}, greedy; {about['device']}, "
        f"torch {about['versions']['torch']}, Transformers {about['versions']['transformers']}, "
        f"{about['date']}."
    )


def _score(cell: dict[str, Any]) -> str:
    change = {name: 100 * cell["change"][name] for name in ("mean", "low", "high")}
    return f"{100 * cell['mean']:.1f} ({{mean:+.1f}}: {{low:+.0f}} to {{high:+.0f}})".format(
        **change
    )


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
    title = f"Wanted blocks resident in time, percent: blocks ranked by {LABELS[rows[0]['index']]}."
    return title + "\n\n" + table(header, lines)


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
    return title + "\n\n" + table(["generation, predictor", "budget", *caps], lines)


def _lookahead_note(results: dict[str, Any]) -> str:
    about, first = results["about"], results["about"]["recordings"][0]
    return (
        "Mean over rounds, layers and heads (5th percentile over rounds and layers) [95 % interval "
        "of the difference to `lru`, bootstrap over 8 rounds in a row]. All have twice the budget "
        "in slots; columns are text and budget. `last` equals `lru` where each step is one token: "
        f"what it asks for is there. {first['model']}, {first['dtype']}, {first['context']:,} "
        f"tokens read densely, {first['following']} decoded. `{about['command']}`, "
        f"{about['date']}: Python {about['python']}, torch {about['torch']}, Transformers "
        f"{about['transformers']}, CPU."
    )


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "needles": needles,
    "needles-mass": mass,
    "smollm2-8k": accuracy,
    "smollm2-blocks": accuracy,
    "retrieval": accuracy,
    "bench": bench,
    "bench-blocks": bench_blocks,
    "bench-caps": bench_caps,
    "bench-caps-32": bench_caps,
    "bench-drafts": bench_drafts,
    "lookahead": lookahead,
}


def between(text: str, name: str) -> tuple[int, int]:
    """Where in `text` the table `name` begins and ends.

    Raises:
        ValueError: the markers are missing.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    if begin not in text or end not in text:
        raise ValueError(f"page: expected the lines {begin.strip()} and {end.strip()}")
    return text.index(begin) + len(begin), text.index(end)


def main(
    name: str = typer.Argument(help=f"One of {', '.join(RENDERERS)}."),
    check: bool = typer.Option(False, help="Fail unless the page has exactly this table."),
    write: bool = typer.Option(False, help="Put the table into the page."),
    results: Path | None = typer.Option(
        None, help="The JSON; eval/results/NAME.json or NAME/summary.json by default."
    ),
    page: Path | None = typer.Option(None, help="The page; the table's own by default."),
) -> None:
    """Print, write or check one table."""
    folder = FOLDER / "results" / SOURCES.get(name, name)
    path = results or (folder / "summary.json" if folder.is_dir() else folder.with_suffix(".json"))
    text = RENDERERS[name](json.loads(path.read_text(encoding="utf-8")))
    if not (check or write):
        print(text)
        return
    path = page or PAGES[name]
    whole = path.read_text(encoding="utf-8")
    start, end = between(whole, name)
    if write:
        path.write_text(whole[:start] + text + whole[end:], encoding="utf-8")
    elif whole[start:end] != text:
        print(f"{path.name}: its table differs; run: python eval/tables.py {name} --write")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
