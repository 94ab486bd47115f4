"""Which index finds one needle among thousands of alike ones? Teacher-forced on the right answer.

A text of nothing but needles has no block that stands out: an index has to tell keys apart that are
nearly the same. Every arm continues one reading of the prompt and is given the right answer token
by token, each of which chooses its blocks anew. The log probability of that answer is a finer scale
than whether a model of little skill would have given it.

Prompts are read with the index "pca", so that its arms go on with what it learned of the prompt's
queries, as they would in use; the other indexes depend on keys alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from oasis_hf.config import OasisConfig
from oasis_hf.tools.packaged import load, smollm2

from ..arms import DENSE, Arm, parse
from ..environment import command, describe
from ..intervals import paired
from ..material.prose import Prose
from ..records import Cells, Record, grouped, mean, write_json
from ..runs.session import DEFAULTS, feed, read
from ..tasks import sample
from ..tasks.prompt import opening, plain

FINE = "keys2bit"
"""Whose blocks all indexes get, so that the choice alone differs: 16 tokens at 2048, 8 at 512."""
RIVALS = ("dense", "oracle")


@dataclass(frozen=True)
class Asked:
    """One prompt with its right answer, as token ids."""

    prompt: list[int]
    answer: list[int]


def arms(indexes: Iterable[str], budgets: Sequence[int]) -> list[Arm]:
    """Each index at each budget, at all of one budget with blocks of one size.

    Raises:
        ValueError: an index cannot be used; says which.
    """
    found = []
    for index in dict.fromkeys(indexes):
        for budget in dict.fromkeys(budgets):
            size = OasisConfig(index=FINE, on_miss="fetch", budget=budget).block_tokens
            found.append(parse(f"{index}/fetch/{budget}/block_size={size}"))
    return found


def ask(tokenizer: Any, task: str, context: int, samples: int, seed: int, text: str) -> list[Asked]:
    """The samples of a task of one question, all answers of which make one right answer.

    Args:
        tokenizer: the model's.
        task: one of `tasks.RULER`.
        context: tokens of prompt and answer together, at most.
        samples: how many.
        seed: of everything that is drawn.
        text: real text, for tasks that hide something in it.

    Raises:
        ValueError: the task does not fit into `context`.
    """
    # Tokenizers warn of texts that are longer than the model takes; such are tried on the way.
    logging.set_verbosity_error()
    prose, found = Prose(text), []
    for number in range(samples):
        drawn = sample(task, tokenizer, context, number, seed, prose)
        (turn,) = drawn["turns"]
        # The answer has the tokens that it has in the text, where a space may be part of the first.
        lead = turn["lead_in"].rstrip(" ")
        prompt = opening(tokenizer, drawn["text"], turn["question"], lead)
        said = turn["lead_in"][len(lead) :] + ", ".join(turn["references"])
        answer = plain(tokenizer, said)
        # A space alone says nothing about retrieval: it is given.
        given = 0 if tokenizer.decode(answer[:1]).strip() else 1
        found.append(Asked(prompt + answer[:given], answer[given:]))
    return found


@torch.no_grad()
def measure(
    model: Any, asked: Sequence[Asked], compared: Sequence[Arm], tell: Callable[[str], None] = print
) -> Cells:
    """One record for each prompt and arm, dense attention first.

    Args:
        model: the model, with its attention set to "oasis".
        asked: prompts and answers.
        compared: the arms besides dense attention.
        tell: told each result.
    """
    found: Cells = []
    for number, one in enumerate(asked):
        tell(f"sample {number + 1} of {len(asked)}: reading {len(one.prompt):,} tokens")
        base = read(model, torch.tensor([one.prompt[:-1]]), index="pca")
        steps = torch.tensor([one.prompt[-1:] + one.answer[:-1]]).split(1, 1)
        for arm in (DENSE, *compared):
            options = {"budget": None, "index": "streaming"} if arm.dense else arm.options
            # One after another, as each is a copy of all keys and values.
            cache = base.fork(**(DEFAULTS | options))
            logits = torch.cat([feed(model, cache, token) for token in steps]).float()
            answer = torch.tensor(one.answer, device=logits.device)
            chosen = logits.log_softmax(-1).gather(1, answer[:, None])
            record: Record = {"sample": number, "arm": arm.name, "budget": arm.budget}
            record |= {"prompt_tokens": len(one.prompt), "answer_tokens": len(one.answer)}
            record["log_probability"] = round(chosen.sum().item(), 4)
            record["right"] = round((logits.argmax(-1) == answer).float().mean().item(), 4)
            found.append(record)
            tell(f"{_label(arm.name):<20} {chosen.sum():9.2f} {record['right']:7.1%}")
    return found


def summary(records: Sequence[Record]) -> Cells:
    """Means of each arm, and paired differences to dense attention and to the oracle."""
    by_arm: dict[str, list[Record]] = grouped(records, "arm")
    logs = {name: [r["log_probability"] for r in group] for name, group in by_arm.items()}
    rows = []
    for name, group in by_arm.items():
        row: dict[str, Any] = {"arm": name, "budget": group[0]["budget"]}
        row |= {value: mean(group, value) for value in ("log_probability", "right")}
        oracle = "/".join(["oracle", *name.split("/")[1:]])
        for rival, other in zip(RIVALS, (DENSE.name, oracle), strict=True):
            if other in logs and name not in (other, DENSE.name):
                row[f"to_{rival}"] = asdict(paired(logs[name], logs[other]))
        rows.append(row)
    return rows


def table(rows: Cells) -> str:
    """The summary for people, in 80 columns."""
    lines = [f"{'':<14}{'log p':>8}{'right':>7}{'to dense':>25}{'to oracle':>25}"]
    for row in rows:
        differences = "".join(f"{_interval(row.get(f'to_{rival}')):>25}" for rival in RIVALS)
        numbers = f"{row['log_probability']:8.1f}{row['right']:7.1%}{differences}"
        lines.append(f"{_label(row['arm']):<14}{numbers}".rstrip())
    return "\n".join(lines)


def _label(arm: str) -> str:
    """The index and the budget of an arm; of a class in a module its name."""
    index, *rest = arm.split("/")
    return " ".join([index.rpartition(":")[2], *rest[1:2]])


def _interval(found: dict[str, float] | None) -> str:
    """A difference with its interval, which one sample alone does not have."""
    if found is None:
        return ""
    form = "{mean:+.1f} ({low:+.1f} to {high:+.1f})" if found["count"] > 1 else "{mean:+.1f}"
    return form.format(**found)


def run(
    out: Path,
    asked: Sequence[Asked],
    compared: Sequence[Arm],
    settings: dict[str, Any],
    source: str = "",
    tell: Callable[[str], None] = print,
) -> str:
    """Measures a model, writes the results, and returns their table.

    Args:
        out: where they go.
        asked: prompts and answers, in tokens of the model.
        compared: the arms besides dense attention.
        settings: what the prompts were made with.
        source: a Hub id or a folder; the packaged SmolLM2 if empty.
        tell: told each result.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, _ = load(source or smollm2())
    records = measure(model, asked, compared, tell)
    about = describe(model) | settings | {"command": command(valued=("--out",))}
    rows = summary(records)
    write_json(out, {"about": about, "rows": rows, "records": records})
    return table(rows)
