"""What a run is summarised to: one cell per arm and context, with intervals and versions."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers

from oasis_eval.texts import source_name
from oasis_hf.index import INDEXES
from oasis_kernels import backend

BLOCK, HEAD_DIM = 16, 64
MEANS = ("hit_rate", "fetched_now", "admitted", "refused", "turnover", "attended")


def wilson(hits: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a proportion."""
    if not total:
        return 0.0, 1.0
    share, spread = hits / total, z * z / total
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return tuple(round(x / (1 + spread), 3) for x in (middle - half, middle + half))  # type: ignore[return-value]


def index_bits(name: str) -> float:
    """Bits that an index holds per key element, in 16-bit precision and blocks of 16."""
    cls = INDEXES[name]
    group = cls.group_tokens(BLOCK)
    index = cls(BLOCK, 1, "mean", backend("reference"))
    parts = index.encode(torch.zeros(1, 1, 1, group, HEAD_DIM, dtype=torch.bfloat16))
    return 8 * sum(part.nbytes for part in parts.values()) / (group * HEAD_DIM)


def digest(settings: dict[str, Any]) -> str:
    """A short hash: answers of equal settings belong together."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe(model: Any, settings: dict[str, Any], earlier: Path | None) -> dict[str, Any]:
    """Where and with what a run was made.

    Args:
        model: the model.
        settings: choices of the run.
        earlier: the summary of a run that this one resumes, whose commands count too.
    """
    from oasis_hf import __version__

    commands: list[str] = []
    if earlier is not None and earlier.exists():
        about = json.loads(earlier.read_text(encoding="utf-8"))["about"]
        commands = about["command"].split("; ")

    return {
        "command": "; ".join(dict.fromkeys([*commands, _command()])),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "model": Path(str(model.config._name_or_path)).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": _device(model.device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "oasis_hf": __version__,
        **settings,
    }


def _command() -> str:
    """The command, without what is particular to this machine."""
    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word in ("--out", "--keep"):
            next(given)
        elif word != "--resume":
            words.append(source_name(word) if Path(word).is_absolute() else word)
    return " ".join(["python eval/needles.py", *words])


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _commit() -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def summarise(about: dict[str, Any], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Dense answers and cells, by context."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        arm = sample["arm"]
        groups[sample["context"], arm["index"], arm["on_miss"], arm["budget"]].append(sample)
    dense, cells = [], []
    for (context, index, on_miss, budget), found in groups.items():
        hits = sum(sample["hit"] for sample in found)
        cell = {"context": context, "hits": hits, "of": len(found)}
        cell["interval"] = wilson(hits, len(found))
        if index == "dense":
            dense.append(cell)
            continue
        cell |= {"index": index, "on_miss": on_miss, "budget": budget}
        cell["bits"] = index_bits(index) if index in INDEXES else None
        cell |= {
            name: round(sum(sample[name] for sample in found) / len(found), 4) for name in MEANS
        }
        cells.append(cell)
    seconds = sum(
        (sample["seconds"] + sample.get("reading", 0)) / sample["together"] for sample in samples
    )
    return {"about": about | {"seconds": round(seconds)}, "dense": dense, "cells": cells}
