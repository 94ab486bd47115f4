"""Runs the cases of a benchmark and writes them down."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import psutil
import torch
import transformers
from transformers import DynamicCache, LlamaForCausalLM

from ..cache import OasisCache
from ..compat import cache_kwarg
from .ceilings import measure
from .workload import filled_cache, heated_keys, random_model


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        batch: sequences.
        tokens: context of each.
        arm: "oasis", "dense" (DynamicCache) or "offloaded" (Transformers' offloaded cache).
        options: choices of the `OasisCache`.
        steps: decode steps timed.
    """

    batch: int
    tokens: int
    arm: str = "oasis"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 40


class GateFailedError(RuntimeError):
    """The engines disagree: no speed is reported."""


def gate() -> dict[str, float]:
    """Compare eager, graph and torch steps of a tiny model in float32.

    Raises:
        GateFailedError: outputs differ by more than rounding.
    """
    torch.manual_seed(0)
    model = random_model("tiny", torch.float32)
    ids = torch.randint(1, 500, (2, 1500), device="cuda")
    worst = {}
    for name, options in {
        "keys2bit": {"on_miss": "fetch"},
        "keys2bit-skip": {"on_miss": "skip"},
        "minmax": {"index": "minmax", "on_miss": "fetch"},
    }.items():
        logits = []
        for extra in (
            {"backend": "reference"},
            {"backend": "triton", "graphs": False},
            {"backend": "triton", "graphs": True},
        ):
            cache = OasisCache(model, budget=256, **options, **extra)
            out = model.generate(
                ids,
                past_key_values=cache,
                max_new_tokens=12,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logits.append(torch.stack(out.logits[:4]))
        worst[name] = max(float((logits[0] - other).abs().max()) for other in logits[1:])
        spread = float(logits[0].std())
        if worst[name] > 0.02 * spread:
            raise GateFailedError(
                f"{name}: logits differ by {worst[name]:.3g} (spread {spread:.3g}); no speed is "
                "reported before the tests pass: pytest tests/test_triton_engine.py"
            )
    return worst


@torch.no_grad()
def _decode_times(
    model: LlamaForCausalLM, cache: Any, batch: int, tokens: int, steps: int
) -> list[float]:
    """Milliseconds of each decode step, after warm-up and capture."""
    ids = torch.randint(1, 500, (batch, 1), device="cuda")
    name, times = cache_kwarg(model), []
    for step in range(steps + 5):
        positions = torch.full((batch, 1), tokens + step, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache})
        end.record()
        times.append((start, end))
        ids = torch.randint(1, 500, (batch, 1), device="cuda")
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in times[5:]]


def _dense_cache(model: LlamaForCausalLM, case: Case) -> Any:
    config = model.config
    if case.arm == "offloaded":
        cache = DynamicCache(config=config, offloading=True)
    else:
        cache = DynamicCache(config=config)
    shape = (case.batch, config.num_key_value_heads, case.tokens, config.head_dim)
    keys = heated_keys(*shape)
    for layer in range(config.num_hidden_layers):
        cache.update(keys.clone(), keys.clone(), layer)
    return cache


def _percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _bytes_per_step(cache: OasisCache, case: Case) -> float:
    """Bytes of working set that a step must read from HBM, weights aside."""
    layers = cache.offloaded
    g = layers[0].geometry
    attended = g.budget_blocks * g.block + g.ring
    per_layer = case.batch * attended * g.token_bytes
    index = layers[0].index
    scanned = sum(
        array.nbytes
        for name, array in index.arrays.items()
        if name in ("low", "high", "lowest", "step")
    )
    return len(layers) * (per_layer + scanned)


def run_case(model: LlamaForCausalLM, case: Case, ceilings: dict[str, Any]) -> dict[str, Any]:
    """Time one case."""
    torch.cuda.empty_cache()
    row: dict[str, Any] = asdict(case)
    if case.arm == "oasis":
        cache = filled_cache(model, case.batch, case.tokens, **case.options)
    else:
        cache = _dense_cache(model, case)
    torch.cuda.reset_peak_memory_stats()
    times = _decode_times(model, cache, case.batch, case.tokens, case.steps)
    row |= {f"ms_p{int(share * 100)}": _percentile(times, share) for share in (0.2, 0.5, 0.8)}
    row["tokens_per_second"] = case.batch / row["ms_p50"] * 1e3
    row["peak_hbm_bytes"] = torch.cuda.max_memory_allocated()
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    moved = 0.0
    if isinstance(cache, OasisCache):
        stats = cache.stats()
        moved = (stats.bytes_fetched - stats.bytes_filled) / max(stats.steps, 1)
        row["stats"] = stats.as_dict()
        row["graphs"] = None if cache.graphs is None else cache.graphs.summary()
        held = _bytes_per_step(cache, case)
    else:
        held = sum(2 * layer.keys.nbytes for layer in cache.layers if layer.keys is not None)
    copy, link = ceilings["device_copy"], ceilings["link_copy"]
    row["hbm_bytes_per_step"], row["link_bytes_per_step"] = weights + held, moved
    row["floor_ms"] = 1e3 * max((weights + held) / copy, moved / link)
    row["ratio_to_floor"] = row["ms_p50"] / row["floor_ms"]
    return row


def time_to_first_token(
    model: LlamaForCausalLM, tokens: int, make: Callable[[], Any]
) -> dict[str, Any]:
    """A real prompt through `generate`: seconds to the first token, and the peak of HBM."""
    ids = torch.randint(1, 500, (1, tokens), device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    cache = make()
    torch.cuda.synchronize()
    start = time.perf_counter()
    options = {} if isinstance(cache, OasisCache) else {"prefill_chunk_size": 16384}
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False, **options)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated()
    return {"tokens": tokens, "seconds": seconds, "peak_hbm_bytes": peak}


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
        "command": " ".join(sys.argv),
    }


def run(
    shape: str,
    cases: list[Case],
    prompts: list[int],
    report: Callable[[dict[str, Any], dict[str, Any]], None],
) -> dict[str, Any]:
    """Gate, ceilings, every case.

    Args:
        shape: a name in `workload.SHAPES`.
        cases: decode cases.
        prompts: lengths of prompts whose time to first token is taken, with Oasis and DynamicCache.
        report: called with each row as it is ready, and the record so far.

    Returns:
        A JSON-ready record of the run.
    """
    record: dict[str, Any] = {"shape": shape, "environment": environment(), "gate": gate()}
    record["ceilings"] = measure()
    record["rows"], record["prompts"] = [], []
    report({"ceilings": record["ceilings"]}, record)
    model = random_model(shape)
    for case in cases:
        try:
            row = run_case(model, case, record["ceilings"])
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            row = asdict(case) | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        record["rows"].append(row)
        report(row, record)
    for tokens in prompts:
        makers: dict[str, Callable[[], Any]] = {
            "oasis": lambda: OasisCache(model, prefill_chunk_size=16384),
            "dense": lambda: DynamicCache(config=model.config),
        }
        for arm, make in makers.items():
            row = {"prompt": arm} | time_to_first_token(model, tokens, make)
            record["prompts"].append(row)
            report(row, record)
    return record
