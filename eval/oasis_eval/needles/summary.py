"""What a run over needles comes to: one cell per arm and context, with intervals."""

from __future__ import annotations

from typing import Any

import torch

from oasis_hf.config import BLOCK
from oasis_hf.index import index_class
from oasis_kernels import backend

from ..arms import DENSE, parse
from ..intervals import wilson
from ..records import Record, grouped, mean
from ..runs.session import COUNTED

HEAD_DIM = 64
MEANS = (*COUNTED, "attended")


def index_bits(index: Any) -> float:
    """Bits that an index holds per key element, in 16-bit precision and blocks of 16."""
    cls = index_class(index)
    group = cls.group_tokens(BLOCK)
    parts = cls(BLOCK, 1, "mean", backend("reference")).encode(
        torch.zeros(1, 1, 1, group, HEAD_DIM, dtype=torch.bfloat16)
    )
    return 8 * sum(part.nbytes for part in parts.values()) / (group * HEAD_DIM)


def summarise(about: dict[str, Any], samples: list[Record]) -> dict[str, Any]:
    """Dense answers and cells, by context."""
    dense, cells = [], []
    for (context, name), found in grouped(samples, "context", "arm").items():
        hits = sum(sample["hit"] for sample in found)
        cell = {"context": context, "hits": hits, "of": len(found)}
        cell["interval"] = wilson(hits, len(found))
        if name == DENSE.name:
            dense.append(cell)
            continue
        arm, (index, on_miss, *_) = parse(name), name.split("/")
        cell |= {"index": index, "on_miss": on_miss, "budget": arm.budget}
        cell["bits"] = index_bits(arm.options["index"])
        cells.append(cell | {name: round(mean(found, name), 4) for name in MEANS})
    seconds = sum(
        (sample["seconds"] + sample.get("reading", 0)) / sample["together"] for sample in samples
    )
    return {"about": about | {"seconds": round(seconds)}, "dense": dense, "cells": cells}
