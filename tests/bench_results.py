"""Small records of runs of the bench, as lines, tables and plots read them."""

from __future__ import annotations

from typing import Any

from oasis_hf.tools.bench import overlap
from oasis_hf.tools.bench.plan import ROOM

BASE = {"budget": 2048, "index": "keys2bit", "on_miss": "skip", "fetch_cap": 0.05}


def result_row(batch: int, tokens: int, arm: str = "oasis", **changes: Any) -> dict[str, Any]:
    """A row as `run_case` makes it, as far as lines, tables and plots read it."""
    row = {
        "batch": batch,
        "tokens": tokens - ROOM,
        "arm": arm,
        "options": BASE | changes.pop("options", {}) if arm == "oasis" else {},
        "ms_p20": 8.0,
        "ms_p50": 8.5,
        "ms_p80": 9.0,
        "tokens_per_second": 1e3 * batch / 8.5,
        "floor_ms": 4.25,
        "ratio_to_floor": 2.0,
        "peak_hbm_bytes": 18_000_000_000,
        "warm_up_seconds": 1.5,
    }
    return row | changes


def results() -> dict[str, Any]:
    """A small record of a run, in the order of a plan."""
    examined = {"piece": 2048, "prompt_peak_hbm_bytes": 21_000_000_000, "prompt_peak_ratio": 1.2}
    return {
        "shape": "llama-3.1-8b",
        "environment": dict.fromkeys(("gpu", "torch", "triton", "transformers", "command"), "x")
        | {"date": "2026-12-01T00:00:00+00:00"},
        "ceilings": {
            "device_copy": 4.2e12,
            "link_copy": 55e9,
            "gather": {"bytes_per_second": 50e9, "beside": 1.1},
        },
        "rows": [
            result_row(1, 131072, **examined),
            result_row(1, 131072, options={"on_miss": "fetch"}),
            result_row(1, 131072, options={"budget": 512}),
            result_row(1, 131072, "dense", ms_p50=85.0, peak_hbm_bytes=34_000_000_000),
            result_row(1, 131072, "offloaded", ms_p50=4250.0),
            result_row(1, 131072, options={"compile": True}, ms_p50=6.0),
            result_row(8, 131072),
            result_row(8, 32768),
            {**result_row(8, 32768, "static"), "error": "OutOfMemoryError: no"},
            result_row(8, 131072, options={"compile": True}, ms_p50=7.0),
        ],
        "prompts": [
            {
                "prompt": "oasis",
                "run": "first",
                "tokens": 131072,
                "prefill_chunk_size": 8192,
                "seconds": 30.0,
                "peak_hbm_bytes": 22_000_000_000,
            },
            {
                "prompt": "dense",
                "run": "first",
                "tokens": 131072,
                "prefill_chunk_size": None,
                "seconds": 13.0,
                "peak_hbm_bytes": 50_000_000_000,
            },
            {
                "prompt": "oasis",
                "run": "again",
                "tokens": 131072,
                "prefill_chunk_size": 8192,
                "error": "MemoryError: no",
            },
        ],
    }


def lookahead_results() -> dict[str, Any]:
    """A record with caps, drafts and the step that fetches nothing."""
    usual: dict[str, Any] = {"drafts": 0, "acceptance": 0.0, "tokens_per_round": 1.0}
    usual |= {"link_bytes_per_step": 110e6, "link_ms": 2.0}
    usual["stats"] = {"cap_blocks": 6, "turnover": 0.1, "hit_rate": 0.9}

    def row(batch: int, speed: float, **changes: Any) -> dict[str, Any]:
        return result_row(batch, 131072, **usual | {"tokens_per_second": speed} | changes)

    none = {
        "options": {"fetch_cap": 0.0},
        "stats": usual["stats"] | {"cap_blocks": 0},
        "ms_p50": 8.0,
    }
    drafts = {"drafts": 4, "acceptance": 0.8, "tokens_per_round": 3.4, "ms_p50": 10.0}
    drafts |= {"accepted_share": 0.6, "tokens_per_round_range": [3.375, 3.4]}
    looked_up = drafts | {"acceptance": "lookup", "tokens_per_round_range": [1.5, 4.0]}
    made = results()
    made["rows"] = [
        row(8, 900.0),
        row(8, 2700.0, **drafts),
        row(8, 880.0, options={"on_miss": "fetch"}),
        row(8, 890.0, options={"fetch_cap": "auto"}, stats=usual["stats"] | {"cap_blocks": 13}),
        row(8, 910.0, options={"fetch_cap": 0.01}, stats=usual["stats"] | {"cap_blocks": 1}),
        row(8, 1000.0, **none | {"link_bytes_per_step": 0.0, "link_ms": 0.0}),
        row(8, 2500.0, **looked_up | {"options": {"fetch_cap": 0.0}}),
        row(1, 100.0),
        result_row(1, 131072, "dense"),
    ]
    overlap.compare([row for row in made["rows"] if "link_ms" in row])
    return made
