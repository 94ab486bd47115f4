"""How much of the true attention the chosen blocks hold, on real code, teacher-forced.

One dense forward over source of the standard library gives every layer's queries and keys; then the
selection alone is replayed, token by token, for each set of options. Nothing is generated, so this
compares options faster, and with less noise, than answers can.

    python eval/needles.py --mass
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from oasis_eval import replay as selection
from oasis_eval.replay import Layer
from oasis_eval.session import feed
from oasis_hf.config import OasisConfig

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


def choices(budgets: list[int], indexes: list[str]) -> list[Choice]:
    """What is compared: indexes, then one option after another of the default index."""
    every = [Choice(index=index) for index in indexes]
    every += [Choice(block_size=size) for size in (4, 8, 32)]
    every += [Choice(sink_tokens=count) for count in (0, 64)]
    every += [Choice(recent_tokens=count) for count in (0, 64)]
    every += [Choice(index=index, reduction="max") for index in ("keys2bit", "minmax")]
    every += [Choice(on_miss="skip", head_room=room) for room in (1.0, 2.0, 4.0)]
    every += [Choice(on_miss="0.01", head_room=room) for room in (1.0, 2.0)]
    return [replace(choice, budget=budget) for choice in every for budget in budgets]


def code(tokenizer: Any, tokens: int) -> Tensor:
    """Ids `[1, tokens]` of real source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((folder / name).read_text() for name in SOURCES)
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


def capture(model: Any, ids: Tensor, steps: int) -> list[Layer]:
    """Queries of the last `steps` tokens and keys of all, of every layer."""
    cache = DynamicCache(config=model.config)
    for piece in ids[:, :-steps].split(512, 1):
        feed(model, cache, piece)
    return selection.capture(model, cache, ids[:, -steps:])[1]


def replay(layer: Layer, choice: Choice) -> tuple[float, float]:
    """Share of the attention that one layer's chosen blocks and tail hold, and of fetches."""
    found = selection.replay(layer, choice.config)
    return found.mass.mean().item(), found.fetched.mean().item()


@torch.inference_mode()
def measure(
    model: Any, tokenizer: Any, tokens: int, steps: int, budgets: list[int], indexes: list[str]
) -> list[dict[str, Any]]:
    """One record for each choice: the share held, mean and worst layer, and the share fetched."""
    layers = capture(model, code(tokenizer, tokens), steps)
    records = []
    for choice in choices(budgets, indexes):
        shares, fetched = zip(*(replay(layer, choice) for layer in layers), strict=True)
        record = {"choice": vars(choice), "changes": choice.changes, "budget": choice.budget}
        record |= {"mean": round(sum(shares) / len(shares), 4), "worst": round(min(shares), 4)}
        record |= {"fetched_now": round(sum(fetched) / len(fetched), 4)}
        records.append(record)
        print(
            f"{choice.changes:<40} {choice.budget:>5} {record['mean']:.3f} ({record['worst']:.2f})",
            flush=True,
        )
    return records
