"""The small retrieval model: what it is trained on, and that training sees what it should."""

from __future__ import annotations

import pytest
import torch

from oasis_eval.retrieval import train
from oasis_eval.retrieval.circuit import lay
from oasis_eval.retrieval.language import CELL, LENGTH, QUERY, Words, draw, skipping, tokenizer

WORDS = Words(40, 30, 20)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("length", "facts", "queries"), [(72, 4, 4), (301, 30, 8), (200, 3, 8)])
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
        assert min(haystack[:CELL]) >= WORDS.first_noise
        for places, answer in zip(
            batch.asked[row].tolist(), batch.answers[row].tolist(), strict=True
        ):
            key = ids[places[0]]
            assert ids[places[0] - 1] == 1 and answer[-1] == 0
            # What is predicted stands right behind where it is predicted from.
            assert [ids[place + 1] for place in places] == answer
            place = haystack.index(key)
            assert haystack[place + 1 : place + CELL] == answer
            assert haystack.count(key) == 1


def test_positions_skip_within_the_span_and_are_natural_without() -> None:
    places = CELL * torch.rand(64, 40, generator=generator()).argsort(-1)[:, :20] + 3
    natural = skipping(places, 300, 0, generator())
    assert torch.equal(natural, torch.arange(300).expand(64, -1))
    assert torch.equal(skipping(places[:, :0], 300, 5000, generator()), natural)
    skipped = skipping(places, 300, 5000, generator())
    steps = skipped.diff()
    assert int(steps.min()) == 1 and int(skipped.max()) < 5000
    # Distances of all sizes come up, and few neighbours are parted.
    assert float((steps > 1).float().mean()) < 0.02
    assert int((skipped[:, -1] > 2500).sum()) > 10 and int((skipped[:, -1] < 2500).sum()) > 10


def test_noise_follows_a_skip() -> None:
    batch = draw(WORDS, 8, 400, 30, 8, generator(), span=5000)
    row, place = torch.nonzero(batch.positions.diff() > 1, as_tuple=True)
    assert len(row) > 8
    behind = batch.ids[row[:, None], place[:, None] + 1 + torch.arange(CELL)]
    assert int(behind.min()) >= WORDS.first_noise


def test_skipped_positions_are_one_sequence_to_the_model() -> None:
    """Transformers takes skips for packed sequences, unless a mask says otherwise."""
    model = train.build(WORDS)
    batch = draw(WORDS, 1, 128, 4, 4, generator(), span=5000)
    assert int(batch.positions.diff().max()) > 1
    other = batch.ids.clone()
    other[0, 0] = WORDS.first_noise + (other[0, 0] - WORDS.first_noise + 1) % WORDS.noise
    changed = type(batch)(other, batch.positions, batch.asked, batch.answers)
    with torch.inference_mode():
        assert not torch.equal(train.outputs(model, batch), train.outputs(model, changed))


def test_the_first_heads_look_back_and_the_second_find_the_fact() -> None:
    torch.manual_seed(0)
    model = train.build(WORDS)
    model.set_attn_implementation("eager")
    batch = draw(WORDS, 2, 200, 12, 6, generator())
    with torch.inference_mode():
        out = model.model(batch.ids, output_attentions=True, use_cache=False)
    back, found = out.attentions
    for head in range(LENGTH + 1):
        # Rows are queries: the diagonal so far below is what each attends to.
        seen = back[:, head].diagonal(-head - 1, 1, 2)
        assert float(seen.min()) > 0.95
    for row in range(2):
        ids = batch.ids[row].tolist()
        for places in batch.asked[row].tolist():
            fact = ids.index(ids[places[0]])
            for step, place in enumerate(places):
                # Mean over heads, which look at different codes of the keys.
                assert int(found[row, :, place].mean(0).argmax()) == fact + step + 1


@pytest.mark.parametrize("span", [0, train.SPAN], ids=["near", "far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_most_is_right_before_any_training_only_with_the_heads(
    span: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for random in (False, True):
        model = train.build(WORDS, random).to(dtype)
        batch = draw(WORDS, 8, 256, 16, 8, generator(), span)
        with torch.inference_mode():
            right = train.rightly(train.outputs(model, batch), batch)
        assert right == 0 if random else right > 0.9


def test_training_moves_all_weights_and_mends_a_noisy_beginning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(train, "SMALL", 4e-3)
    model = train.build(Words(300, 400, 50))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stage = train.Stage(128, 8, 21, 1e-3, 8, 6)
    history = train.train(model, Words(300, 400, 50), [stage], train.SPAN, generator())
    assert [look["step"] for look in history] == [0, 10, 20]
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert all(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )
    assert "length 128, step 20" in capsys.readouterr().out


def test_a_circuit_that_does_not_fit_is_refused() -> None:
    model = train.build(WORDS, random=True)
    model.config.hidden_size = 200
    with pytest.raises(ValueError, match="hidden_size: got 200, expected at least 234"):
        lay(model, WORDS, train.SPAN)


def test_words_are_tokens() -> None:
    words = tokenizer(WORDS)
    text = " ".join(WORDS.list())
    assert words(text).input_ids == list(range(WORDS.count))
    assert words.eos_token_id == 0
    assert words.decode([2, WORDS.first_value, WORDS.first_noise]) == "k0000 v0000 w0000"
