"""How much of the true attention the chosen blocks hold, on real code, teacher-forced.

One dense forward over source of the standard library gives every layer's queries and keys; then the
selection alone is replayed, token by token, for each set of options. Nothing is generated, so this
compares options faster, and with less noise, than answers can.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from oasis_hf.config import OasisConfig
from oasis_hf.tools.packaged import load, smollm2

from ..environment import command, describe
from ..records import Cells, write_json
from ..runs import replay
from ..runs.replay import Layer
from ..runs.session import PREFILL_CHUNK, feed

SOURCES = ("argparse.py", "ast.py", "bdb.py", "calendar.py")


@dataclass(frozen=True)
class Choice:
    """Options of the selection, named as in `OasisConfig`."""

    index: str = "keys2bit"
    budget: int = 256
    block_size: int = 16
    sink_tokens: int = 16
    recent_tokens: int = 32
    reduction: str = "mean"
    on_miss: str = "fetch"
    fetch_cap: float = 0.05
    head_room: float = 2.0

    @property
    def changes(self) -> str:
        """What is not as in the plain choice, in words; the budget is told apart."""
        plain = Choice(budget=self.budget)
        changed = {k: v for k, v in vars(self).items() if v != getattr(plain, k)}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "block_size 16"

    @property
    def config(self) -> OasisConfig:
        """The same as options of a cache."""
        miss = self.on_miss if self.on_miss in ("fetch", "skip") else float(self.on_miss)
        return OasisConfig(**vars(self) | {"on_miss": miss})


def choices(budgets: Sequence[int], indexes: Sequence[str]) -> list[Choice]:
    """What is compared: indexes, then one option after another of the default index.

    Budgets that do not hold a choice's sinks are left out of it.
    """
    every = [Choice(index=index) for index in indexes]
    every += [Choice(block_size=size) for size in (4, 8, 32)]
    every += [Choice(sink_tokens=count) for count in (0, 64)]
    every += [Choice(recent_tokens=count) for count in (0, 64)]
    every += [Choice(index=index, reduction="max") for index in ("keys2bit", "minmax")]
    every += [Choice(on_miss="skip", head_room=room) for room in (1.0, 2.0, 4.0)]
    every += [Choice(on_miss="0.01", head_room=room) for room in (1.0, 2.0)]
    found = [replace(choice, budget=budget) for choice in every for budget in budgets]
    return [choice for choice in found if choice.sink_tokens <= choice.budget]


def code(tokenizer: Any, tokens: int) -> Tensor:
    """Ids `[1, tokens]` of real source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((folder / name).read_text() for name in SOURCES)
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


def capture(model: Any, ids: Tensor, steps: int) -> list[Layer]:
    """Queries of the last `steps` tokens and keys of all, of every layer."""
    cache = DynamicCache(config=model.config)
    for piece in ids[:, :-steps].split(PREFILL_CHUNK, 1):
        feed(model, cache, piece)
    return replay.capture(model, cache, ids[:, -steps:])[1]


@torch.inference_mode()
def measure(
    model: Any,
    tokenizer: Any,
    context: int,
    steps: int,
    budgets: Sequence[int],
    indexes: Sequence[str],
    tell: Callable[[str], None] = print,
) -> Cells:
    """One record for each choice: the share held, mean and worst layer, and the share fetched."""
    compared = [(choice, choice.config) for choice in choices(budgets, indexes)]
    layers = capture(model, code(tokenizer, context), steps)
    records = []
    for choice, config in compared:
        found = [replay.replay(layer, config) for layer in layers]
        shares = [layer.mass.mean().item() for layer in found]
        fetched = [layer.fetched.mean().item() for layer in found]
        record: dict[str, Any] = {"choice": vars(choice), "changes": choice.changes}
        record |= {"budget": choice.budget, "mean": round(sum(shares) / len(shares), 4)}
        record |= {"worst": round(min(shares), 4)}
        records.append(record | {"fetched_now": round(sum(fetched) / len(fetched), 4)})
        held = f"{record['mean']:.3f} ({record['worst']:.2f})"
        tell(f"{choice.changes:<40} {choice.budget:>5} {held}")
    return records


def run(
    out: Path,
    context: int,
    steps: int,
    budgets: Sequence[int],
    indexes: Sequence[str],
    source: str = "",
    tell: Callable[[str], None] = print,
) -> None:
    """Measures a model and writes the results.

    Args:
        out: where they go.
        context: tokens of code.
        steps: last tokens for which the choice is replayed.
        budgets: tokens attended to per KV head.
        indexes: compared with all other options as they are by default.
        source: a Hub id or a folder; the packaged SmolLM2 if empty.
        tell: told each result.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load(source or smollm2())
    found = measure(model, tokenizer, context, steps, budgets, indexes, tell)
    about = describe(model) | {"command": command(valued=("--out",)), "context": context}
    write_json(out, {"about": about, "choices": found})
