"""Runs the cases of a benchmark and writes them down."""

from __future__ import annotations

import itertools
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import psutil
import torch
import transformers
from transformers import LlamaForCausalLM

from ...cache import OasisCache
from ...config import BLOCK
from ...facts.compat import weight_bytes
from .arms import Step, fill, step_of
from .ceilings import measure
from .drafts import draft_rounds
from .gate import CHECKS, COMPILED, FUSED, GateFailedError, largest_difference
from .memory import piece, predicted_bytes, predicted_piece_bytes, prompt_peak, release
from .overlap import compare
from .plan import WARM_UP, Case
from .profiling import kernel_times
from .prompts import first_tokens
from .workload import filled_cache, random_model

Report = Callable[[dict[str, Any], dict[str, Any]], None]


def _timed(run: Callable[[], int], count: int) -> tuple[list[float], list[int]]:
    """Milliseconds of each of `count` runs, and what each returned."""
    times, found = [], []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        found.append(run())
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in times], found


def _decoding(step: Step, case: Case, first: int) -> Callable[[], int]:
    """Decode steps from position `first` on, one a call; returns the tokens kept."""
    position = itertools.count(first)

    def one() -> int:
        ids = torch.randint(1, 500, (case.batch, 1), device="cuda")
        step(ids, torch.full_like(ids, next(position)))
        return case.batch

    return one


def _percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@torch.no_grad()
def run_case(model: LlamaForCausalLM, case: Case, ceilings: dict[str, Any]) -> dict[str, Any]:
    """Time one case."""
    row: dict[str, Any] = asdict(case)
    cache = fill(model, case)
    torch.cuda.reset_peak_memory_stats()
    warm_up = 1 if case.arm == "offloaded" else WARM_UP
    started = time.perf_counter()
    rounds = draft_rounds(model, case, cache) if case.drafts else None
    one = rounds.run if rounds else _decoding(step_of(model, case, cache), case, case.tokens)
    _timed(one, warm_up)
    row["warm_up_seconds"] = time.perf_counter() - started
    if rounds:
        rounds.start()
    times, kept = _timed(one, case.steps)
    if rounds:
        row |= rounds.report()
    row["tokens_per_round"] = sum(kept) / len(kept) / case.batch
    row |= {f"ms_p{int(share * 100)}": _percentile(times, share) for share in (0.2, 0.5, 0.8)}
    row["tokens_per_second"] = case.batch * row["tokens_per_round"] / row["ms_p50"] * 1e3
    row["peak_hbm_bytes"] = torch.cuda.max_memory_allocated()
    weights = weight_bytes(model)[model.device]
    moved = 0.0
    if isinstance(cache, OasisCache):
        stats = cache.stats()
        moved = (stats.bytes_fetched - stats.bytes_filled) / max(stats.steps, 1)
        row["stats"] = stats.as_dict()
        row["graphs"] = None if cache.graphs is None else cache.graphs.summary()
        row["predicted_hbm_bytes"] = predicted_bytes(cache, model)
        row["peak_ratio"] = row["peak_hbm_bytes"] / row["predicted_hbm_bytes"]
        held = sum(layer.parts.step_bytes(layer.columns) for layer in cache.offloaded)
    else:
        held = sum(2 * layer.keys.nbytes for layer in cache.layers if layer.keys is not None)
        moved = held if case.arm == "offloaded" else 0.0
    copy, link = ceilings["device_copy"], ceilings["link_copy"]
    row["hbm_bytes_per_step"], row["link_bytes_per_step"] = weights + held, moved
    row["floor_ms"] = 1e3 * max((weights + held) / copy, moved / link)
    row["ratio_to_floor"] = row["ms_p50"] / row["floor_ms"]
    if case.arm == "oasis":
        row["link_ms"] = 1e3 * moved / link
    return row


@torch.no_grad()
def examine(model: LlamaForCausalLM, case: Case, profile: bool) -> dict[str, Any]:
    """What is not timed: the memory that the last piece of a prompt takes, and the profile.

    A pass of its own, after the timing: a profiler may slow down what runs after it.
    """
    size = piece(case.batch)
    cache = filled_cache(model, case.batch, case.tokens - size, case.heat, **case.options)
    found: dict[str, Any] = {"piece": size}
    try:
        peak = prompt_peak(model, cache, model.config.vocab_size)
        found["prompt_peak_hbm_bytes"] = peak
        predicted = predicted_bytes(cache, model) + predicted_piece_bytes(cache, model)
        found["prompt_peak_ratio"] = peak / predicted
    except Exception as error:
        found["prompt_error"] = _said(error)
    if profile:
        step = step_of(model, case, cache)
        first = cache.get_seq_length()
        _timed(_decoding(step, case, first), WARM_UP)
        ids = torch.randint(1, 500, (case.batch, 1), device="cuda")
        positions = torch.full_like(ids, first + WARM_UP)
        found["profile"] = kernel_times(lambda: step(ids, positions))
    return found


def environment() -> dict[str, Any]:
    """What a figure needs beside it."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "host_memory": psutil.virtual_memory().total,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["oasis-hf", *_without_out(sys.argv[1:])]),
    }


def _without_out(words: list[str]) -> list[str]:
    """A command line without the place of its output, which is of no use elsewhere."""
    found = words.index("--out") if "--out" in words else len(words)
    return words[:found] + words[found + 2 :]


def run(
    shape: str, cases: list[Case], prompts: list[int], report: Report, profile: bool = False
) -> dict[str, Any]:
    """Gate, ceilings, every case, what the base cases take besides, prompts.

    What fails on the way becomes a row with an error.

    Args:
        shape: whose sizes the model has, see `workload.shape_sizes`.
        cases: decode cases, in order.
        prompts: lengths of prompts whose time to first token is taken, with Oasis and DynamicCache.
        report: called with each row as it is ready, and the record so far.
        profile: whether the kernels of the base cases are profiled.

    Returns:
        A JSON-ready record of the run.

    Raises:
        GateFailedError: the engines disagree; if compiled steps alone do, their cases fail.
    """
    record: dict[str, Any] = {"shape": shape, "environment": environment()}
    torch.manual_seed(0)
    tiny = random_model("tiny", torch.float32)
    record["gate"] = {n: largest_difference(tiny, checked, FUSED) for n, checked in CHECKS.items()}
    refused = ""
    if any(case.compiled for case in cases):
        try:
            record["gate"]["compiled"] = largest_difference(tiny, {"block_size": BLOCK}, COMPILED)
        except Exception as error:
            refused = record["gate_error"] = _said(error)
    record["ceilings"] = measure()
    record["rows"], record["prompts"] = [], []
    report({"ceilings": record["ceilings"]}, record)
    model = random_model(shape)
    batch = 0
    for case in cases:
        release()
        if case.batch != batch:
            # Compiled layers have a variant per batch size, and torch a limit of variants.
            torch.compiler.reset()
            batch = case.batch
        try:
            if case.compiled and refused:
                raise GateFailedError(refused)
            row = run_case(model, case, record["ceilings"])
        except Exception as error:
            row = asdict(case) | {"error": _said(error)}
        record["rows"].append(row)
        compare(record["rows"])
        report(row, record)
    for case, row in zip(cases, record["rows"], strict=True):
        if not case.base or "error" in row:
            continue
        release()
        try:
            found = examine(model, case, profile)
        except Exception as error:
            found = {"piece": piece(case.batch), "prompt_error": _said(error)}
        row |= found
        report({"batch": case.batch, "tokens": case.tokens} | found, record)
    for tokens in prompts:
        for row in first_tokens(model, tokens):
            record["prompts"].append(row)
            report(row, record)
            release()
    return record


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
