"""Drafts for every row of a batch: the tokens are those of plain greedy decoding, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    SPARSE,
    assert_close,
    cache_argument,
    dense_cache,
    draft_model,
    generate,
    left_padded,
    prompt,
    tiny_model,
)
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from oasis_hf import OasisCache
from oasis_hf import generation as batched
from oasis_hf.generation.speculation import Speculation

PADS = [0, 37, 130]
TOKENS = 50
"""More than a group of the index, so that groups leave the tail between and inside rounds."""
DRAFTS = ["good", "fair", "bad", "lookup", "none"]


def options_of(kind: str, drafts: str) -> dict[str, Any]:
    if drafts == "lookup":
        return {"prompt_lookup_num_tokens": 4}
    return {} if drafts == "none" else {"draft": draft_model(kind, drafts)}


def speculate(model: Any, ids: Tensor, cache: Any, tokens: int = 24, **options: Any) -> Any:
    """`model.generate` with our loop, greedy by default: its output."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    torch.manual_seed(11)
    return model.generate(
        ids,
        custom_generate=batched.generate,
        return_dict_in_generate=True,
        max_new_tokens=tokens,
        **{cache_argument(model): cache},
        **options,
    )


def repetitive_batch() -> tuple[Tensor, Tensor]:
    """A padded batch in which looking drafts up finds some."""
    ids, mask = left_padded(PADS)
    for row, pad in enumerate(PADS):
        ids[row, pad:] = prompt(17, seed=row).repeat(1, 20)[0, : ids.shape[1] - pad]
    return ids, mask


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_full_budget_gives_the_tokens_of_plain_decoding(kind: str, drafts: str) -> None:
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    ids, mask = repetitive_batch() if drafts == "lookup" else left_padded(PADS)
    want = generate(reference, ids, dense_cache(reference), attention_mask=mask)
    options = {"attention_mask": mask, **options_of(kind, drafts)}
    for target, cache in (
        (model, OasisCache(model, **FULL)),
        (reference, dense_cache(reference)),
    ):
        output = speculate(target, ids, cache, **options)
        assert torch.equal(output.sequences[:, ids.shape[1] :], want)
        assert cache.get_seq_length() == output.sequences.shape[1] - 1
        did = output.speculation
        assert did.tokens == 3 * 23 and (did.drafted > 0) == (drafts != "none")
        if drafts == "good" and kind != "gemma3":
            # The last round's drafts go beyond the length that was asked for.
            assert did.rounds == 5 and did.tokens_per_round == 23 / 5
        if drafts == "fair":
            assert 0 < did.acceptance < 0.9, "rows should keep different numbers of drafts"


@pytest.mark.parametrize(
    ("verification", "drafts"),
    [*(("shared", drafts) for drafts in DRAFTS), ("exact", "fair"), ("exact", "lookup")],
)
def test_a_row_of_a_batch_is_the_row_alone(verification: str, drafts: str) -> None:
    """Below full budget too, with every row's own drafts accepted."""
    model = tiny_model("llama")
    ids, mask = repetitive_batch() if drafts == "lookup" else left_padded(PADS)
    options = options_of("llama", drafts)

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        cache = OasisCache(model, verification=verification, **SPARSE)
        output = speculate(model, ids, cache, 40, attention_mask=mask, **options)
        return output.sequences[:, ids.shape[1] :]

    together = run(ids, mask)
    for row, pad in enumerate(PADS):
        alone = run(ids[row : row + 1, pad:], mask[row : row + 1, pad:])
        assert torch.equal(together[row : row + 1], alone), f"row {row}"


@pytest.mark.parametrize("drafts", ["good", "fair", "lookup"])
def test_exact_verification_gives_the_tokens_of_plain_sparse_decoding(drafts: str) -> None:
    model = tiny_model("llama")
    ids, mask = repetitive_batch() if drafts == "lookup" else left_padded(PADS)
    want = generate(model, ids, OasisCache(model, **SPARSE), TOKENS, attention_mask=mask)
    cache = OasisCache(model, verification="exact", **SPARSE)
    options = options_of("llama", drafts)
    output = speculate(model, ids, cache, TOKENS, attention_mask=mask, **options)
    assert torch.equal(output.sequences[:, ids.shape[1] :], want)
    dense = generate(model, ids, OasisCache(model, budget=2048), TOKENS, attention_mask=mask)
    assert not torch.equal(want, dense), "the budget is not sparse enough to tell"


def test_sharing_one_choice_does_change_tokens() -> None:
    """What the exact mode is for; if this ever fails, the test above proves nothing."""
    model = tiny_model("llama")
    ids, mask = left_padded(PADS)
    want = generate(model, ids, OasisCache(model, **SPARSE), TOKENS, attention_mask=mask)
    options = options_of("llama", "fair")
    got = speculate(model, ids, OasisCache(model, **SPARSE), TOKENS, attention_mask=mask, **options)
    assert not torch.equal(got.sequences[:, ids.shape[1] :], want)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_row_ends_at_its_own_end_of_sequence(kind: str, drafts: str) -> None:
    """Tokens, scores' number and the layout are those of plain decoding."""
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    ids, mask = repetitive_batch() if drafts == "lookup" else left_padded(PADS)
    free = generate(reference, ids, dense_cache(reference), attention_mask=mask)
    # Row 0 ends early, row 2 in the middle, and row 1 perhaps never.
    ends = [int(free[0, 3]), int(free[2, 11])]
    options = {"attention_mask": mask, "eos_token_id": ends}
    want = generate(reference, ids, dense_cache(reference), **options)
    assert (want[0] == 0).sum() > 5, "a row should end before others"
    cache = OasisCache(model, **FULL)
    options |= {"output_scores": True, **options_of(kind, drafts)}
    output = speculate(model, ids, cache, **options)
    assert torch.equal(output.sequences[:, ids.shape[1] :], want)
    assert len(output.scores) == want.shape[1]
    for step, scores in enumerate(output.scores):
        live = want[:, step] != 0
        assert torch.equal(scores.argmax(-1)[live], want[live, step])
    new = output.attention_mask[:, ids.shape[1] :]
    assert torch.equal(new.bool(), want != 0)


class Contains(StoppingCriteria):
    """Ends a row once a token appeared twice behind the prompt."""

    def __init__(self, token: int, behind: int) -> None:
        self.token, self.behind = token, behind

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        return (input_ids[:, self.behind :] == self.token).sum(1) >= 1


@pytest.mark.parametrize("drafts", DRAFTS)
def test_stopping_criteria_end_each_row(drafts: str) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded(PADS)
    free = generate(model, ids, OasisCache(model, **FULL), attention_mask=mask)
    token = int(free[0, 7])
    stop = StoppingCriteriaList([Contains(token, ids.shape[1])])
    options = {"attention_mask": mask, "stopping_criteria": stop, **options_of("llama", drafts)}
    got = speculate(model, ids, OasisCache(model, **FULL), **options).sequences[:, ids.shape[1] :]
    for row in range(3):
        where = (free[row] == token).nonzero()
        end = int(where[0]) + 1 if len(where) else free.shape[1]
        assert torch.equal(got[row, :end], free[row, :end])
        assert (got[row, end:] == 0).all()
    assert (got[0, 8:] == 0).all()


@pytest.mark.parametrize("drafts", ["fair", "lookup", "none"])
def test_processors_see_the_tokens_of_their_own_row(drafts: str) -> None:
    """Penalties and n-grams depend on all tokens before, rejected drafts not among them."""
    model, reference = tiny_model("llama"), tiny_model("llama", "sdpa")
    ids, mask = repetitive_batch()
    rules = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "attention_mask": mask}
    want = generate(reference, ids, dense_cache(reference), **rules)
    without = generate(reference, ids, dense_cache(reference), attention_mask=mask)
    assert not torch.equal(want, without), "the rules should matter"
    options = rules | options_of("llama", drafts)
    got = speculate(model, ids, OasisCache(model, **FULL), **options)
    assert torch.equal(got.sequences[:, ids.shape[1] :], want)


def test_several_continuations_of_one_prompt() -> None:
    """`num_return_sequences` repeats rows before our loop sees them."""
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL)
    output = speculate(
        model,
        prompt(),
        cache,
        num_return_sequences=3,
        do_sample=True,
        **options_of("llama", "fair"),
    )
    assert len({tuple(row) for row in output.sequences.tolist()}) == 3


@pytest.mark.parametrize("second", ["plain", "speculation"])
@pytest.mark.parametrize("drafts", ["fair", "lookup"])
@pytest.mark.parametrize(
    ("kind", "own"), [("llama", "oasis"), ("gemma3", "oasis"), ("llama", "dynamic")]
)
def test_a_second_turn_on_the_same_cache(kind: str, own: str, drafts: str, second: str) -> None:
    """Rows that ended early leave padding in the middle of the text, and nothing else."""
    reference = tiny_model(kind, "sdpa")
    model = tiny_model(kind) if own == "oasis" else reference
    ids, mask = left_padded([0, 37, 110], 160)
    free = generate(reference, ids, dense_cache(reference), attention_mask=mask)
    cache = OasisCache(model, **FULL) if own == "oasis" else dense_cache(model)
    options = {"attention_mask": mask, "eos_token_id": int(free[1, 6])}
    first = speculate(model, ids, cache, **options, **options_of(kind, drafts))
    assert (first.sequences[1] == 0).sum() > 37 + 5
    # All columns but the last are in the cache, the end of row 1 included.
    held = first.attention_mask[:, :-1]
    assert cache.get_seq_length() == held.shape[1]
    if own == "oasis":
        assert torch.equal(cache.ledger.real(), held.bool())
        assert all(
            torch.equal(layer.parts.frontier.lengths, held.sum(1)) for layer in cache.offloaded
        )
    said = torch.cat([first.sequences, prompt(20, 3, seed=9)], 1)
    seen = torch.cat([first.attention_mask, torch.ones(3, 20, dtype=torch.long)], 1)
    tail: dict[str, Any] = {"attention_mask": seen, "output_logits": True}
    if second == "plain":
        name = cache_argument(model)
        tail |= {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
        got = model.generate(said, **{name: cache}, **tail)
    else:
        got = speculate(model, said, cache, 16, **tail, **options_of(kind, drafts))
    for row in range(3):
        if kind == "gemma3" and row == 1:
            # Its sliding layers count the padding, as they do in plain generation.
            continue
        alone = said[row : row + 1, seen[row].bool()]
        want = speculate(reference, alone, dense_cache(reference), 16, output_logits=True)
        # One token more or less before moves few tokens behind, but all logits.
        assert_close(got.logits[0][row], want.logits[0][0], rounding=512)
        assert torch.equal(got.sequences[row, -16:], want.sequences[0, -16:]), f"row {row}"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_one_row_takes_turns_like_any_cache(kind: str) -> None:
    model, reference = tiny_model(kind), tiny_model(kind, "sdpa")
    cache, said = OasisCache(model, **FULL), prompt(90)
    follower = dense_cache(draft_model(kind, "fair"))
    for turn in range(3):
        said = torch.cat([said, prompt(20, seed=turn)], 1)
        want = generate(reference, said, dense_cache(reference), 12)
        options = options_of(kind, "fair") | {"draft_cache": follower}
        output = speculate(model, said, cache, 12, **options)
        assert torch.equal(output.sequences[:, said.shape[1] :], want), f"turn {turn}"
        assert follower.get_seq_length() == cache.get_seq_length()
        said = output.sequences


def test_a_draft_with_an_oasis_cache() -> None:
    """The draft's budget decides what it drafts, and not what is generated."""
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    ids, mask = left_padded(PADS)
    want = generate(model, ids, OasisCache(model, **FULL), attention_mask=mask)
    for follower, budget in ((draft, 64), (tiny_model("llama"), 256)):
        own = OasisCache(follower, budget=budget, recent_tokens=16, max_rows=8)
        options = {"attention_mask": mask, "draft": follower, "draft_cache": own}
        options["num_assistant_tokens"] = 4
        output = speculate(model, ids, OasisCache(model, **FULL), **options)
        assert torch.equal(output.sequences[:, ids.shape[1] :], want)
        assert own.get_seq_length() == output.sequences.shape[1] - 1
    assert output.speculation.rounds == 5, "a draft that is the model itself is always right"


@pytest.mark.parametrize("dense_layers", [(0,), (1,)])
def test_layers_that_stay_on_the_device_move_their_columns(dense_layers: tuple[int, ...]) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded(PADS)
    want = generate(model, ids, OasisCache(model, **FULL), attention_mask=mask)
    cache = OasisCache(model, dense_layers=dense_layers, **FULL)
    output = speculate(model, ids, cache, attention_mask=mask, **options_of("llama", "fair"))
    assert torch.equal(output.sequences[:, ids.shape[1] :], want)


@pytest.mark.parametrize("piece", [None, 50])
@pytest.mark.parametrize("oasis", [True, False])
def test_sliding_windows_of_model_and_draft_are_crossed(oasis: bool, piece: int | None) -> None:
    """Window 40, prompts of 180, tokens one by one in the draft: each row sees its own window."""
    model = tiny_model("gemma3", "oasis" if oasis else "sdpa")
    draft = tiny_model("gemma3", "sdpa")
    ids, mask = left_padded(PADS)
    want = generate(draft, ids, dense_cache(draft), 40, attention_mask=mask)
    cache = OasisCache(model, **FULL) if oasis else dense_cache(model)
    options = {"attention_mask": mask, "draft": draft, "num_assistant_tokens": 4}
    output = speculate(model, ids, cache, 40, prefill_chunk_size=piece, **options)
    assert torch.equal(output.sequences[:, ids.shape[1] :], want)
    assert output.speculation.rounds == 8, "a draft that is the model itself is always right"


def test_a_cache_saved_between_two_turns(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([0, 37, 110], 160)
    free = generate(model, ids, OasisCache(model, **FULL), attention_mask=mask)
    options = {"attention_mask": mask, "eos_token_id": int(free[1, 6])}
    cache = OasisCache(model, **FULL)
    first = speculate(model, ids, cache, **options, **options_of("llama", "fair"))
    cache.save(tmp_path / "cache.safetensors")
    said = torch.cat([first.sequences, prompt(20, 3, seed=9)], 1)
    seen = torch.cat([first.attention_mask, torch.ones(3, 20, dtype=torch.long)], 1)
    answers = [
        speculate(model, said, other, 16, attention_mask=seen, **options_of("llama", "lookup"))
        for other in (cache, OasisCache.load(tmp_path / "cache.safetensors", model))
    ]
    assert torch.equal(answers[0].sequences, answers[1].sequences)


def test_the_other_ways_in() -> None:
    """Called directly with `assistant_model`, and from a folder as `custom_generate`."""
    model, draft = tiny_model("llama"), draft_model("llama", "fair")
    ids, mask = left_padded(PADS)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    want = generate(model, ids, OasisCache(model, **FULL), attention_mask=mask)
    for call, extra in (
        (batched.generate, {"model": model}),
        (
            model.generate,
            {
                "custom_generate": str(Path(__file__).parents[2] / "examples/custom_generate"),
                "trust_remote_code": True,
            },
        ),
    ):
        cache = OasisCache(model, **FULL)
        given = {cache_argument(model): cache, "assistant_model": draft}
        got = call(inputs=ids, **given, **options, **extra)
        assert torch.equal(got[:, ids.shape[1] :], want)
        assert cache.stats().drafted > 0, "the draft should have arrived"


def test_switching_drafts_off_and_on_changes_no_token() -> None:
    """The draft's cache catches up with what was generated without it."""

    class Clock(Speculation):
        def next_length(self) -> int:
            return 4 if self.report().rounds % 5 < 2 else 0

    model = tiny_model("llama")
    ids, mask = left_padded(PADS)
    want = generate(model, ids, OasisCache(model, **FULL), 40, attention_mask=mask)
    for drafts in ("good", "fair", "lookup"):
        options = {"attention_mask": mask, "speculation": Clock(4), **options_of("llama", drafts)}
        output = speculate(model, ids, OasisCache(model, **FULL), 40, **options)
        assert torch.equal(output.sequences[:, ids.shape[1] :], want)
        did = output.speculation
        assert 0 < did.drafted_rounds < did.rounds
        if drafts == "good":
            # All are right only if the draft has seen everything; the last round is cut short.
            assert did.accepted >= did.drafted - 3 * 4


def test_the_report_tells_a_row_of_right_drafts_from_one_of_wrong_drafts() -> None:
    model, draft = tiny_model("llama"), draft_model("llama", "good")
    ids, mask = left_padded([0, 37])

    def spoil(_: Any, __: Any, output: Any) -> None:
        """The second row's draft chooses the token that it thinks the least likely."""
        output.logits[1].neg_()

    hook = draft.register_forward_hook(spoil)
    try:
        options = {"attention_mask": mask, "draft": draft, "speculation": Speculation(4)}
        # A token after the prompt, and five rounds of the first row.
        output = speculate(model, ids, OasisCache(model, **FULL), 1 + 5 * 5, **options)
    finally:
        hook.remove()
    did = output.speculation
    # The second row goes on alone, one token a round.
    assert did.drafted_by_row == (5 * 4, 25 * 4) and did.accepted_by_row == (5 * 4, 0)
    assert did.acceptance_by_row == (1.0, 0.0)
    assert (did.drafted, did.accepted) == (6 * 20, 20)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_numbers_of_rows_add_up(drafts: str) -> None:
    model = tiny_model("llama")
    ids, mask = repetitive_batch() if drafts == "lookup" else left_padded(PADS)
    cache = OasisCache(model, **FULL)
    options = {"attention_mask": mask, **options_of("llama", drafts)}
    did = speculate(model, ids, cache, **options).speculation
    assert len(did.drafted_by_row) == len(did.accepted_by_row) == len(PADS)
    assert sum(did.drafted_by_row) == did.drafted == cache.stats().drafted
    assert sum(did.accepted_by_row) == did.accepted == cache.stats().accepted
    rates = zip(did.acceptance_by_row, did.drafted_by_row, strict=True)
    assert sum(rate * drafted for rate, drafted in rates) == pytest.approx(did.accepted)
