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
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from oasis_hf.index import Index, index_class
from oasis_hf.residency import Residency
from oasis_kernels import backend

SOURCES = ("argparse.py", "ast.py", "bdb.py", "calendar.py")
BLOCK, TAIL_GROUP = 16, 64
OPS = backend("reference")
Layer = tuple[Tensor, Tensor, float]
"""Queries `[Hq, T, D]`, keys `[H, L, D]` and the factor of the logits."""


@dataclass(frozen=True)
class Choice:
    """Options of the selection, named as in `OasisConfig`."""

    index: str = "keys2bit"
    budget: int = 256
    sink_tokens: int = 16
    recent_tokens: int = 32
    reduction: str = "mean"
    on_miss: str = "fetch"
    fetch_cap: float = 0.05
    head_room: float = 2.0

    @property
    def changes(self) -> str:
        """What is not the default, in words; the budget is told apart."""
        plain = Choice(budget=self.budget)
        changed = {k: v for k, v in vars(self).items() if v != getattr(plain, k)}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "defaults"


def choices(budgets: list[int], indexes: list[str]) -> list[Choice]:
    """What is compared: indexes, then one option after another of the default index."""
    every = [Choice(index=index) for index in indexes]
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
    found: dict[int, Layer] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any):
        if query.shape[2] == steps:
            scaling = kw.get("scaling") or module.scaling
            found[module.layer_idx] = (query[0].float(), key[0].float(), scaling)
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    AttentionInterface.register("capture", attention)
    AttentionMaskInterface.register("capture", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation("capture")
    cache = DynamicCache(config=model.config)
    pieces = [*ids[:, :-steps].split(512, 1), ids[:, -steps:]]
    for piece in pieces:
        model(input_ids=piece, past_key_values=cache, logits_to_keep=1)
    model.set_attn_implementation(before)
    return [found[number] for number in sorted(found)]


def replay(layer: Layer, choice: Choice) -> tuple[float, float]:
    """Share of the attention that one layer's chosen blocks and tail hold, and of fetches."""
    query, keys, scaling = layer
    heads, length, _ = keys.shape
    steps = query.shape[1]
    rows = query.unflatten(0, (heads, -1)) * scaling
    index = _index(choice, keys)
    # The same tail for every index, that of the largest groups, so that only the choice differs.
    group = TAIL_GROUP
    wanted = choice.budget // BLOCK
    slots = int(choice.head_room * wanted)
    shape: Any = SimpleNamespace(kv_heads=heads, slots=slots)
    residency = Residency(shape, 1, keys.device, OPS)
    residency.ensure(index.capacity)
    number = torch.arange(index.capacity)
    above = {"fetch": float("-inf"), "skip": float("inf")}.get(choice.on_miss)
    above = float(choice.on_miss) if above is None else above
    cap = max(1, round(choice.fetch_cap * wanted))
    held = fetched = 0.0
    for step in range(steps):
        now = length - steps + step + 1
        stored = max(0, now - 1 - choice.recent_tokens) // group * group
        logits = rows[:, :, step] @ keys[:, :now].transpose(-1, -2)
        tail = torch.logsumexp(logits[..., stored:], -1)
        committed = torch.tensor([stored // BLOCK])
        score = index.score(rows[None, :, :, step], committed, tail[None])
        sink = (number < committed) & (number < -(-choice.sink_tokens // BLOCK))
        score = torch.where(sink, float("inf"), score)
        if not step:
            residency.step(score, slots, float("-inf"), 0)
        plan = residency.step(score, wanted, above, cap)
        share = logits.softmax(-1)
        mass = share[..., :stored].unflatten(-1, (-1, BLOCK)).sum(-1).mean(1)
        mass = torch.nn.functional.pad(mass, (0, index.capacity - mass.shape[-1]))
        used = (plan.hits >= 0) | (plan.now >= 0)
        held += (mass.gather(-1, plan.ids[0]) * used[0]).sum(-1).mean().item()
        held += share[..., stored:].sum(-1).mean().item()
        fetched += (plan.now >= 0).float().mean().item()
    return held / steps, fetched / steps


def _index(choice: Choice, keys: Tensor) -> Index:
    """The index over all full groups of the keys."""
    index = index_class(choice.index)(BLOCK, choice.budget // BLOCK, choice.reduction, OPS)
    group = index.group_tokens(BLOCK)
    full = keys.shape[1] // group
    index.ensure(full * group // BLOCK)
    index.allocate(1, keys.shape[0], keys[None])
    index.write_range(slice(0, 1), 0, keys[None, :, : full * group].unflatten(2, (full, group)))
    return index


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
