"""Results as records: lines of JSON, the folder of a run, and records in groups.

Only the standard library: `oasis_eval.peers` runs where neither oasis_hf nor datasets is.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""One arm's result for one sample."""
Cells = list[dict[str, Any]]
"""What records come to, one for each task, context and arm."""

CONFIG, SAMPLES, SUMMARY = "config.json", "samples.jsonl", "summary.json"
"""Files of a run: what it was made with, a record a line, and the cells of all of them."""
PEERS, PEERS_ABOUT = "peers.jsonl", "peers.json"
"""What another library answered to the same prompts, and what it ran with (see `peers`)."""
OVERALL = "all tasks"
"""Stands for the mean over tasks, each of which counts the same."""


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: it holds none.
    """
    return _object(file.read_text(encoding="utf-8"), str(file))


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON; expected what `oasis-hf` wrote") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds no object; expected what `oasis-hf` wrote")
    return found


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file for people, and the folder it is in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_records(log: Path) -> list[Record]:
    """All records of a file; a last line that was not written in full is dropped, on disk too.

    Raises:
        ValueError: a line is no record.
    """
    text = log.read_text(encoding="utf-8")
    whole, _, torn = text.rpartition("\n")
    if torn:
        log.write_text(whole + "\n" if whole else "", encoding="utf-8")
    return [_object(line, f"{log}, line {n}") for n, line in enumerate(whole.splitlines(), 1)]


def as_lines(records: Iterable[Record]) -> str:
    """Records as a file of them has them."""
    return "".join(json.dumps(record) + "\n" for record in records)


def append_records(log: Path, records: Iterable[Record]) -> None:
    """Adds records to a file."""
    with log.open("a", encoding="utf-8") as file:
        file.write(as_lines(records))


def load_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """What a run was made with, and its results, those of other libraries last.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: its files are not those of a run, or it has no results yet.
    """
    about, log = folder / CONFIG, folder / SAMPLES
    for file in (about, log):
        if not file.exists():
            raise FileNotFoundError(
                f"{folder} holds no {file.name}; expected a folder that `oasis-hf eval` wrote"
            )
    made, records = read_json(about), read_records(log)
    if (folder / PEERS).exists():
        records += read_records(folder / PEERS)
        made["peers"] = read_json(folder / PEERS_ABOUT)
    for record in records:
        if not {"task", "context", "number", "arm"} <= set(record):
            raise ValueError(f"{log}: holds {record}, expected results of `oasis-hf eval`")
    if not records:
        raise ValueError(f"{folder} holds no results yet; let `oasis-hf eval` answer some first")
    return made, records


def reads_tf32(about: dict[str, Any]) -> bool:
    """Whether a run's prompts were read in TF32; its answers never are."""
    return bool(about["device"] != "cpu" and about["dtype"] == "float32")


def place(record: Record) -> tuple[str, int, int]:
    """What arms share: the sample."""
    return record["task"], record["context"], record["number"]


def identity(record: Record) -> tuple[str, int, int, str]:
    """What makes a result one of its own."""
    return (*place(record), record["arm"])


def grouped(records: Iterable[Record], *names: str) -> dict[Any, list[Record]]:
    """Records by some of their values, in the order in which they come."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        values = tuple(record[name] for name in names)
        groups[values if len(names) > 1 else values[0]].append(record)
    return dict(groups)


def mean(records: list[Record], name: str) -> float:
    """Mean of one value."""
    return float(sum(record[name] for record in records) / len(records))


def means(records: list[Record], *names: str) -> dict[str, float]:
    """Of the values that all of the records have; those of older releases lack some."""
    return {n: mean(records, n) for n in names if all(n in record for record in records)}
