"""The generated tasks: RULER's construction, lengths, and whether they can be answered."""

import re
from collections import Counter
from random import Random
from typing import Any

import pytest

pytest.importorskip("datasets")

from eval_helpers import TEXT, read_perfectly, word_tokenizer

from oasis_eval.material.prose import Prose
from oasis_eval.metrics import score
from oasis_eval.tasks import RULER, TASKS, sample
from oasis_eval.tasks.counting import NOISE
from oasis_eval.tasks.dataset import Generator
from oasis_eval.tasks.fill import reserved
from oasis_eval.tasks.hiding import DEPTHS, hide
from oasis_eval.tasks.parts import Draft, Scene
from oasis_eval.tasks.prompt import follow_up, opening, plain
from oasis_eval.tasks.records import extraction

CONTEXT = 4096
PROSE = Prose(TEXT)
TOKENIZER = word_tokenizer()
NEEDLE = r"One of the special magic (number|uuid)s for (\S+) is: (\S+)\."
ASKED = [name for name, task in TASKS.items() if task.metric not in ("loss", "drift")]


def draw(name: str, number: int = 0, context: int = CONTEXT, seed: int = 0) -> dict[str, Any]:
    return sample(name, TOKENIZER, context, number, seed, PROSE)


# ---- what holds for every task -----------------------------------------------------------------


def test_the_thirteen_of_ruler_are_there() -> None:
    assert list(RULER) == [
        *(f"niah_single_{n}" for n in (1, 2, 3)),
        *(f"niah_multikey_{n}" for n in (1, 2, 3)),
        "niah_multivalue",
        "niah_multiquery",
        "vt",
        "cwe",
        "fwe",
        "qa_1",
        "qa_2",
    ]


@pytest.mark.parametrize("name", ASKED)
def test_a_perfect_reader_scores_all_and_a_blind_one_nothing(name: str) -> None:
    for number in range(3):
        found = draw(name, number)
        for turn in found["turns"]:
            perfect = read_perfectly(name, found["text"], turn["question"])
            assert score(TASKS[name].metric, perfect, turn["references"]) == 1
            # Who has not read the text can only repeat the question and the start of the answer.
            blind = turn["question"] + turn["lead_in"]
            assert score(TASKS[name].metric, blind, turn["references"]) == 0


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("context", [2048, CONTEXT])
def test_prompt_and_answers_fill_the_context(name: str, context: int) -> None:
    found = draw(name, 1, context)
    if not found["turns"]:
        assert context - 8 <= len(plain(TOKENIZER, found["text"])) <= context
        return
    first, *others = found["turns"]
    ids = opening(TOKENIZER, found["text"], first["question"], first["lead_in"])
    assert found["tokens"] == len(ids)
    later = sum(len(follow_up(TOKENIZER, turn["question"], turn["lead_in"])) for turn in others)
    used = len(ids) + later + found["answer_tokens"] * len(found["turns"])
    assert context - 8 <= used <= context


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_the_same_samples_however_many(name: str) -> None:
    few, many = (Generator(TOKENIZER, PROSE, 5).build(name, 2048, count) for count in (1, 2))
    assert few[0] == many[0] != many[1]
    assert draw(name, 0, 2048, seed=6)["text"] != few[0]["text"]


@pytest.mark.parametrize("name", ASKED)
def test_references_are_distinct_and_none_is_part_of_another(name: str) -> None:
    for turn in draw(name, 2)["turns"]:
        references = turn["references"]
        assert references and len(set(references)) == len(references)
        if TASKS[name].metric == "string_match_all":
            assert all(sum(one in other for other in references) == 1 for one in references)


def test_a_context_that_is_too_short_says_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"cwe: context: got 256.*use at least \d+"):
        draw("cwe", context=256)


def test_reserved_counts_every_answer() -> None:
    assert reserved(TOKENIZER, Draft(PROSE.started(0), (), 100)) == 0


# ---- needles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "needles", "keys", "references", "value"),
    [
        ("niah_single_1", 1, 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, 1, r"[0-9a-f-]{36}"),
        ("niah_multikey_1", 4, 4, 1, r"\d{7}"),
        ("niah_multivalue", 4, 1, 4, r"\d{7}"),
        ("niah_multiquery", 4, 4, 4, r"\d{7}"),
        ("needles_11", 11, 11, 11, r"\d{7}"),
    ],
)
def test_counts_of_needles(name: str, needles: int, keys: int, references: int, value: str) -> None:
    found = draw(name)
    facts = re.findall(NEEDLE, found["text"])
    assert len(facts) == needles
    assert len({key for _, key, _ in facts}) == keys
    assert all(re.fullmatch(value, held) for _, _, held in facts)
    assert len(found["turns"][0]["references"]) == references
    assert len(found["depths"]) == needles


@pytest.mark.parametrize("kind", ["niah_multikey_2", "niah_multikey_3"])
def test_a_haystack_of_needles_holds_nothing_else(kind: str) -> None:
    found = draw(kind)
    facts = re.findall(NEEDLE, found["text"])
    assert len(facts) > 250
    assert len({key for _, key, _ in facts}) == len({held for *_, held in facts}) == len(facts)
    asked = next(n for n, fact in enumerate(facts) if fact[2] in found["turns"][0]["references"])
    assert asked / len(facts) == pytest.approx(found["depths"][0], abs=0.02)


def test_needles_stand_at_their_depths() -> None:
    for number in range(6):
        found = draw("niah_single_2", number)
        place = found["text"].index("One of the special")
        assert place / len(found["text"]) == pytest.approx(found["depths"][0], abs=0.02)


def test_forty_samples_use_forty_depths() -> None:
    depths = [draw("niah_single_2", number, 512)["depths"][0] for number in range(40)]
    assert sorted(depths) == list(DEPTHS)
    assert (min(DEPTHS), max(DEPTHS)) == (0, 1)


def test_sentences_are_hidden_between_sentences() -> None:
    text = "One two. Three four. Five six."
    assert hide(text, ["X.", "Y."], [1, 0]) == f"Y. {text} X."
    assert hide(text, ["X."], [0.35]) == "One two. X. Three four. Five six."


def test_one_conversation_asks_the_first_question_twice() -> None:
    turns = draw("ask_again")["turns"]
    assert len(turns) == 5 and turns[0] == turns[-1]
    assert len({turn["references"][0] for turn in turns}) == 4


# ---- the others --------------------------------------------------------------------------------


def test_variables_are_assigned_in_order() -> None:
    found = draw("vt")
    names = re.findall(r"VAR (\w{5}) = ", found["text"])
    assert names == found["turns"][0]["references"] and len(names) == 5


@pytest.mark.parametrize(
    ("context", "often", "rarely", "example"),
    [(2048, 6, 1, (20, 3, 1)), (4095, 6, 1, (20, 3, 1)), (4096, 30, 3, (40, 10, 3))],
)
def test_common_words_are_as_common_as_in_ruler(
    context: int, often: int, rarely: int, example: tuple[int, int, int]
) -> None:
    """Repeats in the list and in its worked example, and how many words the example has."""
    found = draw("cwe", context=context)
    worked, rest = found["text"].rsplit("The 10 most common words are: ", 1)
    words = re.findall(r"\d+\. (\S+)", rest)
    counts = Counter(words[10:])
    common = found["turns"][0]["references"]
    assert {counts.pop(word) for word in common} == {often}
    assert set(counts.values()) == {rarely} and len(counts) > 20
    # The worked example has other words, and its answer is right.
    assert not {*words[:10]} & {*common}
    shown = Counter(re.findall(r"\d+\. (\S+)", worked))
    assert {word for word, _ in shown.most_common(10)} == {*words[:10]}
    assert (len(shown), *sorted({*shown.values()}, reverse=True)) == example


def test_made_up_words_follow_zipf() -> None:
    found = draw("fwe")
    counts = Counter(found["text"].split("coded text: ")[1].split())
    ranked = counts.most_common(6)
    assert ranked[0][0] == NOISE
    assert [word for word, _ in ranked[1:4]] == found["turns"][0]["references"]
    total = 4000
    for rank, (_, count) in enumerate(ranked[:4], 1):
        assert count == pytest.approx(total / rank**2 / 1.645, rel=0.1)
    assert ranked[3][1] > ranked[4][1]


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_the_answer_is_in_one_document_only(name: str) -> None:
    found = draw(name)
    documents = found["text"].split("Document ")[1:]
    (answer,) = found["turns"][0]["references"]
    assert sum(answer in document for document in documents) == 1
    assert len(documents) > 20


def test_records_are_three_to_twenty() -> None:
    scenes = (Scene(Random(n), n, 8192, PROSE.started(0)) for n in range(200))
    counts = {len(extraction(scene).turns[0].references) for scene in scenes}
    assert counts == {*range(3, 21)}


def test_every_step_of_the_long_chain_needs_the_one_before() -> None:
    found = draw("running_total")
    assert len(found["turns"][0]["references"]) == 24
    lines = read_perfectly("running_total", found["text"], "").splitlines()
    wrong = [line if n < 3 else line + "0" for n, line in enumerate(lines)]
    assert score("line_match", "\n".join(wrong), found["turns"][0]["references"]) == 3 / 24


def test_processes_of_their_own_make_the_same_samples() -> None:
    with Generator(TOKENIZER, PROSE, 5, workers=2) as several:
        for task in ("niah_single_2", "cwe"):
            several.begin(task, 2048, 3)
        for task in ("niah_single_2", "cwe"):
            found = several.build(task, 2048, 3)
            assert found.to_list() == Generator(TOKENIZER, PROSE, 5).build(task, 2048, 3).to_list()
        several.begin("cwe", 256, 2)
        with pytest.raises(ValueError, match="cwe: context: got 256"):
            several.build("cwe", 256, 2)
