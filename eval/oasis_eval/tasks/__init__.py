"""The tasks by name, and their samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from ..material.prose import Prose
from . import answering, counting, language, needles, recall, records, tracing
from .fill import fill
from .parts import Draft, Sample, Scene, Task

ALL_OF, ANY_OF = "string_match_all", "string_match_part"

RULER: dict[str, Task] = {
    "niah_single_1": Task(partial(needles.niah, haystack="filler"), ALL_OF, "a number in filler"),
    "niah_single_2": Task(needles.niah, ALL_OF, "a number in prose"),
    "niah_single_3": Task(partial(needles.niah, kind="uuid"), ALL_OF, "a UUID in prose"),
    "niah_multikey_1": Task(partial(needles.niah, count=4), ALL_OF, "one of four keys"),
    "niah_multikey_2": Task(needles.niah_needles, ALL_OF, "one of needles only"),
    "niah_multikey_3": Task(
        partial(needles.niah_needles, kind="uuid"), ALL_OF, "one of UUIDs only"
    ),
    "niah_multivalue": Task(partial(needles.niah, values=4), ALL_OF, "four values of one key"),
    "niah_multiquery": Task(
        partial(needles.niah, count=4, queries=4), ALL_OF, "the values of four keys"
    ),
    "vt": Task(tracing.variables, ALL_OF, "a chain of five variables"),
    "cwe": Task(counting.common_words, ALL_OF, "the ten common words of a list"),
    "fwe": Task(counting.frequent_words, ALL_OF, "the three most frequent made-up words"),
    "qa_1": Task(answering.one_hop, ANY_OF, "a fact in one of many documents"),
    "qa_2": Task(answering.two_hop, ANY_OF, "a fact by way of another document"),
}
"""RULER's thirteen, in its order."""

RECALL: dict[str, Task] = {
    "recall_one": Task(recall.recall, ALL_OF, "one fact in noise"),
    "recall_many": Task(
        partial(recall.recall, many=True), ALL_OF, "one of as many facts as there are keys"
    ),
}
"""In the words of the small retrieval model, which `oasis-hf study retrieval-model` trains."""

LANGUAGE: dict[str, Task] = RULER | {
    "needles_11": Task(
        partial(needles.niah, count=11, queries=11), ALL_OF, "eleven needles at once"
    ),
    "ask_again": Task(needles.ask_again, ALL_OF, "five questions in one conversation"),
    "extraction": Task(records.extraction, "exact_fields", "records as JSON"),
    "copy": Task(records.copy, "line_match", "records repeated"),
    "sort": Task(records.sort, "line_match", "records sorted by number"),
    "running_total": Task(tracing.running_total, "line_match", "24 steps, each after the last"),
    "language": Task(language.language, "loss", "loss and fidelity on real text"),
}
"""Every task for models of natural language but `long_output`, which takes thousands of steps."""

TASKS: dict[str, Task] = (
    LANGUAGE
    | {"long_output": Task(language.long_output, "drift", "drift from dense over a long output")}
    | RECALL
)
"""Every task."""


def drafted(
    name: str, context: int, number: int, seed: int, prose: Prose
) -> tuple[Draft, Callable[[int], str]]:
    """A sample before it is filled, and the words of prose that fill it; as in `sample`."""
    draw = Random(f"{seed}/{name}/{context}/{number}")
    words = prose.started(draw.random())
    return TASKS[name].make(Scene(draw, number, context, words)), words


def sample(name: str, tokenizer: Any, context: int, number: int, seed: int, prose: Prose) -> Sample:
    """Draws one sample; the same arguments give the same one.

    Args:
        name: one of `TASKS`.
        tokenizer: the model's.
        context: tokens of prompt and answers together.
        number: of the sample in its data set.
        seed: of everything that is drawn.
        prose: real text.

    Raises:
        ValueError: the task does not fit into `context`.
    """
    draft, words = drafted(name, context, number, seed, prose)
    try:
        text, tokens = fill(tokenizer, draft, context, words)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return {
        "task": name,
        "number": number,
        "context": context,
        "tokens": tokens,
        "text": text,
        "turns": [vars(turn) | {"references": list(turn.references)} for turn in draft.turns],
        "answer_tokens": draft.answer_tokens,
        "depths": list(draft.depths),
    }
