"""What it costs in acceptance that a draft attends to a bounded number of tokens.

The draft has the model's own weights, so with a full cache all drafts are accepted but those of a
text's last round, which is cut short. What is missing beside that is what the budget costs. Texts
are real prose, continued greedily by the model with a full cache, so that all budgets draft for the
same tokens.

    python eval/draft_budget.py                  # SmolLM2-135M, 4K tokens
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from transformers import DynamicCache

from oasis_eval.environment import describe
from oasis_eval.intervals import bootstrap
from oasis_eval.texts import read_text
from oasis_hf import OasisCache
from oasis_hf.config import BLOCK
from oasis_hf.generation import Speculation, generate
from oasis_hf.packaged import load, smollm2


@torch.no_grad()
def main(
    context: int = typer.Option(4096, help="Tokens of each prompt."),
    rows: int = typer.Option(4, help="Prompts, consecutive pieces of the text."),
    new: int = typer.Option(64, help="Tokens generated behind each."),
    length: int = typer.Option(4, help="Tokens drafted per round."),
    budgets: str = typer.Option("2048,1024,512,256,128", help="Of the draft's cache."),
    text: str = typer.Option("reference", help="As in `oasis-hf eval --text`."),
    out: Path = typer.Option(Path(__file__).parent / "results" / "draft-budget.json"),
) -> None:
    """Acceptance by budget of the draft's cache."""
    model, tokenizer = load(smollm2(), attn_implementation="sdpa", dtype=torch.float32)
    draft, _ = load(smollm2(), dtype=torch.float32)
    ids = tokenizer(read_text(text), return_tensors="pt").input_ids[0, : rows * context]
    prompts = ids.view(rows, context).to(model.device)
    found = []
    for budget in (None, *map(int, budgets.split(","))):
        rates, drafted = [], 0
        for row in prompts.split(1):
            cache = DynamicCache(config=draft.config)
            if budget is not None:
                cache = OasisCache(draft, budget=budget, block_size=BLOCK)
            output = generate(
                model,
                row,
                past_key_values=DynamicCache(config=model.config),
                draft=draft,
                draft_cache=cache,
                speculation=Speculation(length),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                return_dict_in_generate=True,
            )
            report = output.speculation
            rates.append(report.acceptance)
            drafted += report.drafted
        estimate = bootstrap(rates)
        found.append(
            {
                "budget": budget,
                "acceptance": estimate.mean,
                "low": estimate.low,
                "high": estimate.high,
                "drafted": drafted,
            }
        )
        print(f"{budget or 'all':>5}: {estimate.mean:.1%} of {drafted} drafts", flush=True)
        settings = {"context": context, "rows": rows, "new": new, "length": length, "text": text}
        record = {"about": describe(model) | settings, "rows": found}
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
