"""Retrieval under sparse attention: which index, at which budget, still finds a fact in real prose?

Each prompt, prose with a needle in it, is read once, densely. From there every arm (an index, a
budget, a policy for misses) continues an identical copy of the cache: the last token of the prompt
and every decoded token attend sparsely. Only needles that dense attention answers count.

    python eval/needles.py                       # the table of the README
    python eval/needles.py --quick               # a few minutes
    python eval/needles.py --resume              # go on where a run was interrupted

Each answer is appended to a log beside the output; `python eval/tables.py needles` prints the
table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mass as attention_mass
import torch
import typer
from arms import DENSE, Arm, plan, read, run_arm
from haystack import LEAD_IN, Batch, Haystack
from summary import describe, digest, summarise
from transformers.utils import logging

from oasis_eval.texts import available, read_text, source_name
from oasis_hf.packaged import load, smollm2

RESULTS = Path(__file__).parent / "results" / "needles.json"


def run_batch(
    model: Any,
    tokenizer: Any,
    batch: Batch,
    arms: list[Arm],
    known: dict[str, list[dict[str, Any]]],
    extra: dict[str, Any],
    keep: Path | None,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the samples of every arm that is not known yet, the dense one first."""
    dense = known.get(DENSE.name)
    missing = [arm for arm in arms if arm.name not in known]
    if dense is not None and not (missing and any(sample["hit"] for sample in dense)):
        return
    started = time.perf_counter()
    base = read(model, batch, keep)
    reading = round(time.perf_counter() - started, 2)
    print(f"  read {len(batch.needles)} x {batch.tokens} tokens in {reading:.0f} s", flush=True)
    last = torch.cat([batch.ids, batch.lead_in], 1)[:, -1:]
    if dense is None:
        rows = list(range(len(batch.needles)))
        result = run_arm(model, tokenizer, base, DENSE, last, batch.limit, {}) | {
            "reading": reading
        }
        dense = samples(batch, DENSE, rows, result)
        yield dense
    found = [sample["needle"] - batch.first for sample in dense if sample["hit"]]
    if found:
        base.batch_select_indices(torch.tensor(found))
    for arm in missing if found else []:
        result = run_arm(model, tokenizer, base, arm, last[found], batch.limit, extra)
        yield samples(batch, arm, found, result)


def samples(
    batch: Batch, arm: Arm, rows: list[int], result: dict[str, Any]
) -> list[dict[str, Any]]:
    """One record for each row."""
    shared = {name: value for name, value in result.items() if name != "answers"}
    shared["together"] = len(rows)
    records = []
    for row, text in zip(rows, result["answers"], strict=True):
        needle = batch.needles[row]
        record = {"needle": batch.first + row, "tokens": batch.tokens, "city": needle.city}
        record |= {"number": needle.number, "depth": round(needle.depth, 4), "arm": asdict(arm)}
        records.append(record | {"answer": text, "hit": needle.answer in text} | shared)
    return records


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [int(part) for part in text.split(",") if part]


def main(
    contexts: str = typer.Option("4096,8192", help="Lengths of the prompt and its answer."),
    budgets: str = typer.Option("128,256,512,1024,2048", help="Tokens attended to per KV head."),
    indexes: str = typer.Option("keys2bit,minmax,oracle,streaming,mean"),
    policies: str = typer.Option("fetch,skip,0.01", help="A number: fetch above that share."),
    needles: int = typer.Option(16, help="Needles in each cell, all answered by dense attention."),
    rows: int = typer.Option(4, help="Prompts read and answered together."),
    text: str = typer.Option("", help="austen, essays, reference or a file; the first there is."),
    seed: int = typer.Option(0),
    model: str = typer.Option("", help="A Hub id or a folder; the packaged SmolLM2 by default."),
    dtype: str = typer.Option("", help="float32 or bfloat16; what the machine is fast in."),
    out: Path = typer.Option(RESULTS, help="The summary; the log of answers lies beside it."),
    options: str = typer.Option("{}", help="More options of the cache for every arm, as JSON."),
    lead_in: bool = typer.Option(True, help="Give the start of the answer, as RULER does."),
    threads: int = typer.Option(0, help="CPU threads; torch's choice by default."),
    every: bool = typer.Option(False, help="All combinations, not only the informative ones."),
    resume: bool = typer.Option(False, help="Keep the answers of an earlier, equal run."),
    keep: Path | None = typer.Option(None, help="Folder to keep what was read; large."),
    mass: bool = typer.Option(False, help="Attention mass held on real code, no answers."),
    steps: int = typer.Option(48, help="Tokens replayed with --mass."),
    quick: bool = typer.Option(False, help="4 needles, 2K, two budgets; not into the README."),
) -> None:
    """Run the evaluation and write its summary."""
    if quick:
        contexts, budgets, policies, needles = "2048", "128,256", "fetch", 4
        out = out.with_name("needles-quick.json") if out == RESULTS else out
    if threads:
        torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    llm, tokenizer = load(model or smollm2(), **({"dtype": dtype} if dtype else {}))
    arms = plan(indexes.split(","), policies.split(","), numbers(budgets), every)
    text = text or available()
    settings = {
        "seed": seed,
        "lead_in": LEAD_IN if lead_in else "",
        "text": source_name(text),
        "options": json.loads(options),
    }
    shown = settings | {"contexts": numbers(contexts), "needles": needles}
    about = describe(llm, shown, out if resume else None)
    key = digest(settings | {"model": about["model"], "dtype": about["dtype"]})
    out.parent.mkdir(parents=True, exist_ok=True)
    if mass:
        found = attention_mass.measure(
            llm, tokenizer, numbers(contexts)[0], steps, numbers(budgets), indexes.split(",")
        )
        report = {"about": about, "choices": found}
        path = out.with_name(f"{out.stem}-mass.json")
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return
    log = out.with_suffix(".jsonl")
    records = _read_log(log, key) if resume else []
    if not resume:
        log.unlink(missing_ok=True)
    haystack_text = read_text(text)
    for context in numbers(contexts):
        haystack = Haystack(tokenizer, haystack_text, context, seed, lead_in)
        first, left = 0, needles
        while left > 0 and first < 4 * needles:
            batch = haystack.batch(first, min(rows, left))
            print(f"{context}: needles from {first}, {left} to go", flush=True)
            known = _known(records, context, batch)
            with torch.inference_mode():
                for found in run_batch(
                    llm, tokenizer, batch, arms, known, settings["options"], keep
                ):
                    found = [{"key": key, "context": context} | sample for sample in found]
                    records += found
                    with log.open("a", encoding="utf-8") as file:
                        file.writelines(json.dumps(sample) + "\n" for sample in found)
                    hits = sum(sample["hit"] for sample in found)
                    name, seconds = Arm(**found[0]["arm"]).name, found[0]["seconds"]
                    print(f"  {name:<24} {hits}/{len(found)} {seconds:.0f} s", flush=True)
            dense = _known(records, context, batch)[DENSE.name]
            first, left = first + len(batch.needles), left - sum(x["hit"] for x in dense)
            out.write_text(json.dumps(summarise(about, records), indent=1) + "\n", encoding="utf-8")


def _read_log(log: Path, key: str) -> list[dict[str, Any]]:
    """Samples of earlier runs with the same settings."""
    if not log.exists():
        return []
    samples = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [sample for sample in samples if sample["key"] == key]


def _known(
    records: list[dict[str, Any]], context: int, batch: Batch
) -> dict[str, list[dict[str, Any]]]:
    """Samples of one batch, by arm."""
    numbers = range(batch.first, batch.first + len(batch.needles))
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in records:
        if sample["context"] == context and sample["needle"] in numbers:
            found.setdefault(Arm(**sample["arm"]).name, []).append(sample)
    return found


if __name__ == "__main__":
    typer.run(main)
