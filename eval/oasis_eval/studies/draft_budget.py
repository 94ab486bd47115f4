"""What it costs in acceptance that a draft attends to a bounded number of tokens.

The draft has the model's own weights, so with a full cache all drafts are accepted but those of a
text's last round, which is cut short. What is missing next to that is what the budget costs. Texts
are real prose, continued greedily by the model with a full cache, so that all budgets draft for the
same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from oasis_hf import OasisCache
from oasis_hf.config import BLOCK
from oasis_hf.generation import Speculation, generate
from oasis_hf.tools.packaged import load, smollm2

from ..environment import command, describe
from ..intervals import bootstrap
from ..material.texts import read_text
from ..records import Cells, write_json


@torch.no_grad()
def measure(
    model: Any,
    draft: Any,
    prompts: Tensor,
    new: int,
    length: int,
    budgets: Sequence[int],
    tell: Callable[[str], None] = print,
) -> Cells:
    """Acceptance with a full cache of the draft, and by the budget of a bounded one.

    Args:
        model: what accepts.
        draft: what drafts.
        prompts: `[rows, tokens]` ids.
        new: tokens generated after each.
        length: tokens drafted per round.
        budgets: of the draft's cache.
        tell: told each result.
    """
    found = []
    for budget in (None, *budgets):
        rates, drafted = [], 0
        for row in prompts.split(1):
            output = generate(
                model,
                row,
                past_key_values=DynamicCache(config=model.config),
                draft=draft,
                draft_cache=_cache(draft, budget),
                speculation=Speculation(length),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                return_dict_in_generate=True,
            )
            rates.append(output.speculation.acceptance)
            drafted += output.speculation.drafted
        estimate = asdict(bootstrap(rates))
        record = {"budget": budget, "acceptance": estimate["mean"], "drafted": drafted}
        found.append(record | {name: estimate[name] for name in ("low", "high")})
        tell(f"{budget or 'all':>5}: {estimate['mean']:.1%} of {drafted} drafts")
    return found


def _cache(draft: Any, budget: int | None) -> Any:
    if budget is None:
        return DynamicCache(config=draft.config)
    return OasisCache(draft, budget=budget, block_size=BLOCK)


def run(
    out: Path,
    context: int,
    rows: int,
    new: int,
    length: int,
    budgets: Sequence[int],
    text: str,
    tell: Callable[[str], None] = print,
) -> None:
    """Measures SmolLM2 with itself as draft, and writes the results.

    Args:
        out: where they go.
        context: tokens of each prompt.
        rows: prompts, consecutive pieces of the text.
        new: tokens generated after each.
        length: tokens drafted per round.
        budgets: of the draft's cache.
        text: as in `oasis-hf eval --text`.
        tell: told each result.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load(smollm2(), attn_implementation="sdpa", dtype=torch.float32)
    draft, _ = load(smollm2(), dtype=torch.float32)
    ids = tokenizer(read_text(text), return_tensors="pt").input_ids[0, : rows * context]
    prompts = ids.view(rows, context).to(model.device)
    found = measure(model, draft, prompts, new, length, budgets, tell)
    settings = {"context": context, "rows": rows, "new": new, "length": length, "text": text}
    settings["command"] = command(valued=("--out",))
    write_json(out, {"about": describe(model) | settings, "rows": found})
