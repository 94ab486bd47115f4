"""The small retrieval model: what it is trained on, and that training sees what it should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("datasets")

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import train_retrieval as train

from oasis_eval.recall import CELL, LENGTH, QUERY, Words, draw, skipping, tokenizer

WORDS = Words(40, 30, 20)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("length", "facts", "queries"), [(64, 4, 4), (301, 30, 8), (200, 3, 8)])
def test_every_question_has_its_answer_in_the_text_once(
    length: int, facts: int, queries: int
) -> None:
    batch = draw(WORDS, 3, length, facts, queries, generator())
    assert batch.ids.shape == batch.positions.shape == (3, length)
    asked = min(facts, queries)
    assert batch.answers.shape == batch.asked.shape == (3, asked, LENGTH + 1)
    for row in range(3):
        ids = batch.ids[row].tolist()
        haystack = ids[: length - QUERY * asked]
        assert sum(2 <= token < WORDS.first_value for token in haystack) == facts
        for places, answer in zip(
            batch.asked[row].tolist(), batch.answers[row].tolist(), strict=True
        ):
            key = ids[places[0]]
            assert ids[places[0] - 1] == 1 and answer[-1] == 0
            # What is predicted stands right behind where it is predicted from.
            assert [ids[place + 1] for place in places] == answer
            # A turned text may cut one fact in two.
            doubled = haystack + haystack
            place = haystack.index(key)
            assert doubled[place + 1 : place + CELL] == answer
            assert haystack.count(key) == 1


def test_positions_skip_within_the_span_and_are_natural_without() -> None:
    natural = skipping(4, 300, 0, generator())
    assert torch.equal(natural, torch.arange(300).expand(4, -1))
    skipped = skipping(64, 300, 5000, generator())
    steps = skipped.diff()
    assert int(steps.min()) == 1 and int(skipped.max()) < 5000
    # Distances of all sizes come up, and few neighbours are parted.
    assert float((steps > 1).float().mean()) < 0.02
    assert int((skipped[:, -1] > 2500).sum()) > 10 and int((skipped[:, -1] < 2500).sum()) > 10


def test_skipped_positions_are_one_sequence_to_the_model() -> None:
    """Transformers takes skips for packed sequences, unless a mask says otherwise."""
    model = train.build(WORDS, True)
    batch = draw(WORDS, 1, 128, 4, 4, generator(), span=5000)
    assert int(batch.positions.diff().max()) > 1
    other = batch.ids.clone()
    other[0, 0] = WORDS.first_noise + (other[0, 0] - WORDS.first_noise + 1) % WORDS.noise
    changed = type(batch)(other, batch.positions, batch.asked, batch.answers)
    with torch.inference_mode():
        assert not torch.equal(train.outputs(model, batch), train.outputs(model, changed))


def test_a_few_steps_lower_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    stage = train.Stage(64, 8, 101, 4e-3, 4, 4, 60.0)
    history = train.train(train.build(WORDS, True), WORDS, [stage], 1000, generator())
    assert [look["step"] for look in history] == [0, 25, 50, 75, 100]
    # The end is learnt first, then that answers are values of the text.
    assert history[-1]["loss"] < 0.6 * history[0]["loss"]
    assert "length 64, step 100" in capsys.readouterr().out


def test_words_are_tokens() -> None:
    words = tokenizer(WORDS)
    text = " ".join(WORDS.list())
    assert words(text).input_ids == list(range(WORDS.count))
    assert words.eos_token_id == 0
    assert words.decode([2, WORDS.first_value, WORDS.first_noise]) == "k0000 v0000 w0000"
