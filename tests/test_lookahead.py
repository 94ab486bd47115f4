"""The replay lab: what it replays is what the cache does, and predictors differ as they should."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import build_model, dense_cache, tiny_model
from torch import Tensor
from typer.testing import CliRunner

from oasis_hf import OasisCache
from oasis_hf.cli import app
from oasis_hf.lookahead import PREDICTORS, Predictor, Rounds, predictor
from oasis_hf.tools import packaged
from oasis_hf.tools.lab import Grid, Options, Recording, Run, Scores, measure, replay, score
from oasis_hf.tools.lab.drafts import early_exit, find_match, prompt_lookup, right
from oasis_hf.tools.lab.grid import interval
from oasis_hf.tools.lab.record import generate, generate_at_once, read, rounds_of
from oasis_hf.tools.lab.scores import Layout
from oasis_hf.tools.lab.session import adopt

CONTEXT, FOLLOWING, BUDGET = 600, 80, 128
LAYOUT = Layout(recent_tokens=8, max_rows=8)


def text(length: int = CONTEXT + FOLLOWING) -> list[int]:
    """Ids with repetitions, so that prompt lookup has something to find."""
    generator = torch.Generator().manual_seed(3)
    phrases = torch.randint(3, 128, (8, 12), generator=generator)
    order = torch.randint(8, (length // 12 + 1,), generator=generator)
    return phrases[order].flatten()[:length].tolist()


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Two generations over one dense context: one token a step, and verifications."""
    model, ids = tiny_model("llama"), text()
    cache = dense_cache(model)
    keys, scaling = read(model, ids[:CONTEXT], cache)
    values = torch.stack([layer.values[0] for layer in cache.layers])
    kinds = {"right": {"probe": right(ids)}, "lookup": {"draft": prompt_lookup(4)}}
    runs = {
        name: generate_at_once(model, ids, CONTEXT, rounds_of(ids, CONTEXT, **kind), cache)
        for name, kind in kinds.items()
    }
    return Recording(keys, values, scaling, {"text": "phrases"}, runs)


def test_all_rounds_at_once_are_the_rounds_one_by_one(recording: Recording) -> None:
    model, ids = tiny_model("llama"), text()
    cache = dense_cache(model)
    read(model, ids[:CONTEXT], cache)
    run = generate(model, ids, rounds_of(ids, CONTEXT, prompt_lookup(4)), cache)
    for name, part in vars(run).items():
        torch.testing.assert_close(getattr(recording.runs["lookup"], name), part, msg=name)


class Wrong(Predictor):
    """The blocks that the next round wants least."""

    name = "wrong"

    def score(self, rounds: Rounds) -> Tensor:
        return torch.where(rounds.following.isfinite(), -rounds.following, float("-inf"))


def scores_of(recording: Recording, run: str, index: str = "keys2bit") -> Scores:
    names = {name: predictor(name) for name in [*PREDICTORS, "last+layer"]} | {"wrong": Wrong()}
    return score(recording, recording.runs[run], index, names, LAYOUT)


@pytest.mark.parametrize("index", ["keys2bit", "minmax", "oracle"])
@pytest.mark.parametrize("on_miss", ["fetch", "skip"])
@pytest.mark.parametrize("verifies", [False, True], ids=["steps", "verifications"])
def test_the_replay_ends_with_the_residents_of_a_real_cache(
    index: str, on_miss: str, verifies: bool
) -> None:
    model, ids = tiny_model("llama"), text()
    cache = OasisCache(
        model,
        budget=BUDGET,
        block_size=LAYOUT.block_size,
        index=index,
        on_miss=on_miss,
        recent_tokens=LAYOUT.recent_tokens,
        max_rows=LAYOUT.max_rows,
    )
    if verifies:
        cache.activate_past_recording()
    keys, scaling = read(model, ids[:CONTEXT], cache)
    rounds = rounds_of(ids, CONTEXT, prompt_lookup(4) if verifies else None)
    run = generate(model, ids, rounds, cache)
    recording = Recording(keys, keys, scaling, {}, {"real": run})
    scores = score(recording, run, index, {}, LAYOUT)
    outcome = replay(scores, Options(budget=BUDGET, on_miss=on_miss))
    assert int(scores.committed[-1]) > scores.before, "no group left the tail"
    blocks = scores.wanted.shape[-1]
    for number, layer in enumerate(cache.layers):
        counts = layer.parts.counters.read()
        per_head = {"hits": outcome.recall, "now": outcome.now, "later": outcome.behind}
        heads = layer.parts.geometry.kv_heads
        wanted = {name: figure[:, number].sum() * heads for name, figure in per_head.items()}
        wanted["hits"] *= BUDGET // 16
        assert {name: counts[name] for name in wanted} == pytest.approx(
            {name: figure.item() for name, figure in wanted.items()}
        )
        real, ours = layer.parts.residency, outcome.residency
        assert torch.equal(real.slot_of_block[0, :, :blocks], ours.slot_of_block[number, :, :-1])
        assert torch.equal(real.last_selected[0], ours.last_selected[number])


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
@pytest.mark.parametrize("run", ["right", "lookup"])
def test_the_oracle_misses_nothing_without_a_cap(
    recording: Recording, run: str, index: str
) -> None:
    options = Options("oracle", BUDGET, fetch_cap=None)
    scores = scores_of(recording, run, index)
    outcome = replay(scores, options)
    assert outcome.recall.min() == 1
    assert outcome.now.sum() == 0
    # Groups that leave the tail may be wanted instead of a block that was fetched.
    quiet = torch.cat([torch.tensor([False]), scores.committed.diff() == 0])
    assert torch.equal(outcome.used[quiet], outcome.ahead[quiet])


def test_a_right_probe_row_is_the_oracle(recording: Recording) -> None:
    scores = scores_of(recording, "right")
    probe, oracle = (
        replay(scores, Options(name, BUDGET, fetch_cap=None)).recall for name in ("draft", "oracle")
    )
    torch.testing.assert_close(probe, oracle, atol=0.01, rtol=0)


def test_lru_moves_nothing_ahead_and_a_cap_bounds_what_does(recording: Recording) -> None:
    scores = scores_of(recording, "lookup")
    assert replay(scores, Options(budget=BUDGET)).ahead.sum() == 0
    capped = replay(scores, Options("oracle", BUDGET, fetch_cap=0.25))
    assert 0 < capped.ahead.max() <= 2


def test_a_broken_predictor_is_worse_than_none(recording: Recording) -> None:
    scores = scores_of(recording, "right")
    wrong, alone, oracle = (
        replay(scores, Options(name, BUDGET, fetch_cap=None)) for name in ("wrong", "lru", "oracle")
    )
    assert wrong.recall.mean() < alone.recall.mean() - 0.05
    assert alone.recall.mean() < oracle.recall.mean() - 0.05
    assert wrong.used.sum() < 0.1 * wrong.ahead.sum()
    assert wrong.mass.mean() < alone.mass.mean() < oracle.mass.mean()


@pytest.mark.parametrize("name", [*PREDICTORS, "last+layer"])
def test_a_predictor_scores_every_stored_block_or_leaves_it_out(
    recording: Recording, name: str
) -> None:
    scores = scores_of(recording, "lookup")
    found = scores.predicted[name]
    assert found.shape == scores.wanted.shape
    assert not found.isnan().any()
    stored = torch.arange(found.shape[-1]) < scores.committed[:, None]
    assert (found[~stored[:, None, None].expand_as(found)] == float("-inf")).all()


def test_all_blocks_and_the_tail_hold_all_attention(recording: Recording) -> None:
    scores = scores_of(recording, "lookup")
    whole = scores.mass.sum(-1) + scores.tail
    torch.testing.assert_close(whole, torch.ones_like(whole))


def test_rejected_rows_leave_no_keys_behind(recording: Recording) -> None:
    plain, lookup = recording.runs["right"], recording.runs["lookup"]
    assert 0 < lookup.acceptance < 1
    assert lookup.tokens == plain.tokens == FOLLOWING - 1
    kept = [
        run.key.permute(0, 2, 1, 3, 4)[
            :, :, torch.arange(run.key.shape[3]) <= run.accepted[:, None]
        ]
        for run in (plain, lookup)
    ]
    torch.testing.assert_close(*kept, atol=1e-4, rtol=1e-4)


def test_a_layer_that_adds_nothing_is_seen_through() -> None:
    model, ids = build_model("Qwen3", {"num_hidden_layers": 3}), text(60)
    first = model.model.layers[0]
    for module in (first.self_attn.o_proj, first.mlp.down_proj):
        torch.nn.init.zeros_(module.weight)
    cache = dense_cache(model)
    read(model, ids[:48], cache)
    run = generate(model, ids, rounds_of(ids, 48), cache)
    assert run.peek[0].count_nonzero() == 0
    torch.testing.assert_close(run.peek[1], run.query[1])
    assert not torch.allclose(run.peek[2], run.query[2], atol=0.1)


def test_a_saved_recording_replays_the_same(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "phrases.safetensors")
    again = Recording.load(tmp_path / "phrases.safetensors")
    assert again.about == recording.about
    first, second = (
        replay(scores_of(each, "lookup"), Options("layer", BUDGET)) for each in (recording, again)
    )
    assert torch.equal(first.recall, second.recall)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"anything": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="expected a recording"):
        Recording.load(tmp_path / "x.safetensors")


def test_prompt_lookup_follows_the_latest_match() -> None:
    assert find_match([1, 2, 3, 9, 1, 2, 3]) == 3
    assert find_match([1, 2, 3]) == -1
    assert prompt_lookup(2)([5, 6, 7, 8, 5, 6]) == [7, 8]


@torch.no_grad()
def test_an_early_exit_of_all_layers_drafts_what_the_model_says() -> None:
    model, ids = tiny_model("llama"), text(40)
    cache = dense_cache(model)
    read(model, ids[:30], cache)
    drafts = [early_exit(model, cache, ids, 30, layers, 3) for layers in (2, 1)]
    assert [layer.get_seq_length() for layer in cache.layers] == [30, 30]
    assert model.config.num_hidden_layers == 2
    for length in (31, 36):
        whole, first = (draft(ids[:length]) for draft in drafts)
        greedy = model.generate(torch.tensor([ids[:length]]), max_new_tokens=3, do_sample=False)
        assert whole == greedy[0, length:].tolist()
        assert len(first) == 3


@torch.no_grad()
def test_a_dense_context_is_adopted_as_a_prompt_before_drafts() -> None:
    model, ids = tiny_model("llama"), text()
    dense, options = dense_cache(model), {"budget": BUDGET, "max_rows": 8, "recent_tokens": 8}
    read(model, ids[:CONTEXT], dense)
    adopted, real = OasisCache(model, **options), OasisCache(model, **options)
    adopt(adopted, dense)
    real.activate_past_recording()
    read(model, ids[:CONTEXT], real)
    rounds = list(rounds_of(ids, CONTEXT, probe=right(ids)))[:12]
    first, second = (generate(model, ids, rounds, cache) for cache in (adopted, real))
    for name, part in vars(first).items():
        torch.testing.assert_close(part, getattr(second, name), msg=name)
    assert adopted.stats().steps == real.stats().steps > 0


def test_unknown_predictors_are_named() -> None:
    with pytest.raises(ValueError, match="'tea'"):
        predictor("last+tea")


def test_an_interval_holds_the_mean() -> None:
    values = torch.linspace(-1, 3, 64)
    low, high = interval(values)
    assert low < 1 < high
    assert interval(torch.full((5,), 2.0)) == (2.0, 2.0)


def test_a_grid_has_every_predictor_beside_lru(recording: Recording) -> None:
    grid = Grid(predictors=("layer",), indexes=("keys2bit",), budgets=(BUDGET,), swept=("layer",))
    only = replace(recording, runs={"right": recording.runs["right"]})
    rows = list(measure(only, grid))
    assert {row["predictor"] for row in rows} == {"lru", "layer", "oracle"}
    assert not any("draft" in x.predictor for x in grid.options("", recording.runs["lookup"], ""))
    assert {row["fetch_cap"] for row in rows if row["predictor"] == "layer"} >= {0.01, 0.2, None}
    for row in rows:
        low, high = row["over_lru"][1:]
        assert low <= row["over_lru"][0] <= high
        assert (row["predictor"] == "lru") == (row["over_lru"] == [0, 0, 0])
    json.dumps(rows)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
)
def test_the_command_prints_a_table_and_writes_a_report(tmp_path: Path) -> None:
    words = ["lookahead", "--texts", "needles", "--runs", "lookup", "--context", "600"]
    words += ["--tokens", "24", "--budgets", "128", "--indexes", "keys2bit"]
    words += ["--predictors", "layer", "--recordings", str(tmp_path), "--out"]
    runner = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"})
    reports = []
    for name in ("first.json", "again.json"):
        result = runner.invoke(app, [*words, str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert "oracle" in result.output
        reports.append(json.loads((tmp_path / name).read_text(encoding="utf-8")))
    assert reports[0]["rows"] == reports[1]["rows"]
    assert reports[0]["about"]["recordings"][0]["text"] == "needles"


def test_runs_are_padded_with_rows_that_count_for_nothing(recording: Recording) -> None:
    run: Run = recording.runs["lookup"]
    beyond = torch.arange(run.query.shape[3]) >= (run.rows + run.probes)[:, None]
    assert run.query.permute(1, 3, 0, 2, 4)[beyond].count_nonzero() == 0


def _committed(run: Run) -> Tensor:
    """`[R, T]` bool, rows that were accepted."""
    return torch.arange(run.key.shape[3]) <= run.accepted[:, None]
