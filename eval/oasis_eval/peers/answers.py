"""The prompts of a run for methods of other libraries, and their answers.

They run in an environment of their own (`peers.press`), so that files are all that passes between
the two: the prompts go out by `write_prompts`, and the answers come back by `merge`, which scores
them with the metrics of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from oasis_hf.tools.packaged import smollm2

from ..arms import DENSE, is_peer
from ..config import EvalConfig
from ..material.prose import Prose
from ..material.texts import read_text
from ..metrics import scores
from ..records import (
    PEERS,
    PEERS_ABOUT,
    Record,
    as_lines,
    identity,
    load_run,
    place,
    read_json,
    read_records,
    write_json,
)
from ..tasks import TASKS
from ..tasks.dataset import Generator
from ..tasks.prompt import opening
from .files import ABOUT, ANSWERS, COMMAND, FIELDS, PROMPT, SAME


def write_prompts(folder: Path, file: Path, tokenizer: Any = None) -> int:
    """Writes the prompts of a run as JSON lines, made anew from the run's config.

    A line holds what names the sample, "ids" (all of the prompt, its lead-in included), "limit"
    (most tokens of the answer) and "references". Conversations and texts without a question are
    left out.

    Args:
        folder: of a run of `oasis-hf eval`; the samples that dense attention answered are taken.
        file: where the prompts go.
        tokenizer: the model's; loaded if not given.

    Returns:
        How many were written.

    Raises:
        FileNotFoundError: the folder holds no run, or the run's text is not there.
        ValueError: the run has no task of one question, or other prompts come out now.
    """
    about, records = load_run(folder)
    config = EvalConfig(**about["config"])
    known = _dense(records)
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(config.model or smollm2())
    prose = Prose(read_text(config.text or about["text"]))
    found: list[Record] = []
    with Generator(tokenizer, prose, config.seed) as makes:
        for task, context in sorted({key[:2] for key in known}):
            count = 1 + max(key[2] for key in known if key[:2] == (task, context))
            for sample in makes.build(task, context, count):
                if place(sample) not in known or len(sample["turns"]) != 1:
                    continue
                line = _prompt(tokenizer, sample, config)
                _check_same(line, known[place(sample)], "text")
                found.append(line)
    if not found:
        raise ValueError(
            f"run: {folder} has no answers to tasks of one question, expected some of such as "
            "niah_single_2; run `oasis-hf eval` with it first"
        )
    # A peer that is interrupted has answered some of every task.
    found.sort(key=lambda prompt: int(prompt["number"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_lines(found), encoding="utf-8")
    return len(found)


def _prompt(tokenizer: Any, sample: Any, config: EvalConfig) -> Record:
    (turn,) = sample["turns"]
    return {name: sample[name] for name in PROMPT if name != "references"} | {
        "references": [turn["references"]],
        "limit": config.limit(sample["task"], sample["answer_tokens"]),
        "ids": opening(tokenizer, sample["text"], turn["question"], turn["lead_in"]),
    }


def merge(folder: Path, answers: Path) -> list[Record]:
    """Scores what a peer answered, and adds it to a run; an arm's older answers are replaced.

    Args:
        folder: of the run that the prompts are from.
        answers: the folder that `python -m oasis_eval.peers` wrote.

    Returns:
        The records that were added.

    Raises:
        FileNotFoundError: a folder does not hold its files.
        ValueError: an answer is malformed, or not to a prompt of this run, or the model or its
            dtype are not the run's.
    """
    about, records = load_run(folder)
    known = _dense(records)
    for name in (ANSWERS, ABOUT):
        if not (answers / name).exists():
            raise FileNotFoundError(
                f"answers: {answers} holds no {name}; expected a folder that `{COMMAND}` wrote"
            )
    made = read_json(answers / ABOUT)
    for name in ("model", "dtype"):
        if made.get(name) != about[name]:
            raise ValueError(
                f"answers: got {name} {made.get(name)!r} in {answers / ABOUT}, expected the run's, "
                f"{about[name]!r}; run `{COMMAND}` with it"
            )
    found = read_records(answers / ANSWERS)
    for number, record in enumerate(found, 1):
        _check(record, known, f"{answers / ANSWERS}, line {number}")
    added = [_scored(record) for record in found]
    new = {identity(record) for record in added}
    kept = [r for r in records if is_peer(r["arm"]) and identity(r) not in new]
    (folder / PEERS).write_text(as_lines([*kept, *added]), encoding="utf-8")
    write_json(folder / PEERS_ABOUT, made)
    return added


def _dense(records: list[Record]) -> dict[tuple[str, int, int], Record]:
    """The dense answers by sample."""
    return {place(r): r for r in records if r["arm"] == DENSE.name and "answers" in r}


def _check(record: Record, known: dict[tuple[str, int, int], Record], where: str) -> None:
    missing = [name for name in FIELDS if name not in record]
    if missing:
        raise ValueError(
            f"answers: {where} has no {', '.join(missing)}; expected what `{COMMAND}` writes"
        )
    if not is_peer(record["arm"]):
        raise ValueError(
            f"answers: {where} is of arm {record['arm']!r}, expected LIBRARY-METHOD/TOKENS, such "
            "as kvpress-snapkv/512"
        )
    if place(record) not in known:
        raise ValueError(
            f"answers: {where} is to {_named(record)}, which the run has not; name the run that "
            "the prompts were written from"
        )
    _check_same(record, known[place(record)], f"answers: {where}")


def _check_same(record: Record, dense: Record, what: str) -> None:
    """Raise `ValueError` unless both are of one prompt."""
    for name in SAME:
        if record[name] != dense[name]:
            raise ValueError(
                f"{what}: got {name} {record[name]} for {_named(record)}, expected the run's, "
                f"{dense[name]}: these are other prompts; write them again from this run, with the "
                "text, model and version that it was made with"
            )


def _named(record: Record) -> str:
    return f"{record['task']} {record['context']} number {record['number']}"


def _scored(record: Record) -> Record:
    found = scores(TASKS[record["task"]].metric, record["answers"], record["references"])
    return record | {"score": sum(found) / len(found)}
