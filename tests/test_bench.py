"""The bench without its GPU: planning, filling, accounting, failing rows."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import BASE, result_row, results
from helpers import prompt, tiny_model
from typer.testing import CliRunner

from oasis_hf import OasisCache
from oasis_hf.cli import app
from oasis_hf.cli.bench import line
from oasis_hf.facts.compat import weight_bytes
from oasis_hf.generation.drafting import PromptLookup
from oasis_hf.generation.text import Text
from oasis_hf.tools.bench import Case, Choices, arms, overlap, plan, profiling, prompts, workload
from oasis_hf.tools.bench.drafts import LookupRounds, SetRounds, draft_rounds, kept_tokens, script
from oasis_hf.tools.bench.memory import piece, predicted_bytes, predicted_piece_bytes
from oasis_hf.tools.bench.plan import ARMS, FITS, ROOM, SIZES

runner = importlib.import_module("oasis_hf.tools.bench.run")

DEFAULT = plan(SIZES, ARMS, Choices(), 40)


def size_of(case: Case) -> tuple[int, int]:
    return case.batch, case.tokens + ROOM


# ---- planning ----------------------------------------------------------------------------------


def test_the_default_plan_changes_one_choice_of_the_base_at_a_time() -> None:
    for size in SIZES:
        found = [case.options for case in DEFAULT if case.arm == "oasis" and size_of(case) == size]
        expected = [BASE, BASE | {"on_miss": "fetch"}, BASE | {"index": "minmax"}]
        if size == SIZES[0]:
            expected.append(BASE | {"budget": 512})
        assert found == [*expected, BASE | {"compile": True}]
        assert [c.options for c in DEFAULT if c.base and size_of(c) == size] == [BASE]


def test_transformers_caches_are_planned_where_the_full_kv_fits() -> None:
    sizes = {arm: [size_of(case) for case in DEFAULT if case.arm == arm] for arm in ARMS[1:]}
    assert sizes["dense"] == sizes["static"] == [(1, 131072), (8, 32768)]
    assert sizes["offloaded"] == [(1, 131072)]
    assert all(batch * context <= FITS for batch, context in sizes["dense"])
    assert {case.steps for case in DEFAULT if case.arm == "offloaded"} == {2}


def test_compiled_cases_are_the_last_of_their_batch_size() -> None:
    order = [(case.batch, case.compiled) for case in DEFAULT]
    assert order == sorted(order)
    assert {batch for batch, compiled in order if compiled} == {1, 8, 32}


def test_single_values_plan_a_single_case() -> None:
    choices = Choices((512,), ("minmax",), (0.01,), (0.05,), (True,))
    (case,) = plan([(2, 4096)], ["oasis"], choices, 3)
    options = {"budget": 512, "index": "minmax", "on_miss": 0.01, "fetch_cap": 0.05}
    options["compile"] = True
    assert case == Case(2, 4096 - ROOM, "oasis", options, 3, base=True)


def test_a_plan_without_sense_is_explained() -> None:
    with pytest.raises(ValueError, match="arms: got paged"):
        plan(SIZES, ["oasis", "paged"], Choices(), 1)
    with pytest.raises(ValueError, match="budgets: got no value"):
        Choices(budgets=())
    with pytest.raises(ValueError, match="drafts: got 32, expected 0 to 31"):
        plan(SIZES, ["oasis"], Choices(), 1, 32, [0.5])
    with pytest.raises(ValueError, match=r"acceptance: got 1\.5"):
        plan(SIZES, ["oasis"], Choices(), 1, 4, [0.5, 1.5])
    with pytest.raises(ValueError, match="acceptance: got luck, expected lookup or a probability"):
        plan(SIZES, ["oasis"], Choices(), 1, 4, ["luck"])


def test_drafts_are_planned_beside_the_base_and_its_compiled_case() -> None:
    """And beside what is done about misses: other policies, and no lookahead."""
    choices = Choices(caps=(0.01, 0.05, "auto", 0.0))
    found = [case for case in plan(SIZES, ARMS, choices, 40, 4, [0.6, 0.8]) if case.drafts]
    changes: list[dict[str, Any]] = [{}, {"on_miss": "fetch"}, {"fetch_cap": 0.0}]
    changes.append({"compile": True})
    assert len(found) == len(SIZES) * len(changes) * 2
    assert {(case.drafts, case.acceptance) for case in found} == {(4, 0.6), (4, 0.8)}
    assert all(case.options in [BASE | change for change in changes] for case in found)
    assert not any(case.base for case in found)


def test_caps_change_nothing_else() -> None:
    """0.05 is the base's wherever it stands, so that other rows stay comparable."""
    choices = Choices((2048,), ("keys2bit",), ("skip",), (0.01, 0.05, None, "auto", 0.0), (False,))
    found = [case.options for case in plan([(8, 32768)], ["oasis"], choices, 3)]
    assert found == [BASE, *(BASE | {"fetch_cap": cap} for cap in (0.01, None, "auto", 0.0))]
    (only,) = plan(
        [(8, 32768)], ["oasis"], Choices((512,), ("minmax",), ("skip",), (0.2,), (False,)), 1
    )
    assert only.base and only.options["fetch_cap"] == 0.2
    with pytest.raises(ValueError, match="fetch_cap: got 7"):
        Choices(caps=(7,))
    with pytest.raises(ValueError, match="caps: got 2 of them beside the policy 'fetch'"):
        Choices(policies=("fetch", "skip"), caps=(0.05, 0.0))


def test_sizes_of_blocks_meet_every_budget_and_policy() -> None:
    choices = Choices(
        (2048, 512), ("keys2bit", "minmax"), compile=(False, True), block_sizes=(16, "auto")
    )
    found = [case.options for case in plan([(1, 131072)], ["oasis"], choices, 3)]
    base = BASE | {"block_size": 16}
    changes: list[dict[str, Any]] = [{}, {"on_miss": "fetch"}, {"index": "minmax"}, {"budget": 512}]
    fine = [{"block_size": "auto"} | change for change in changes if "index" not in change]
    changed = [*changes, *fine, {"compile": True}]
    assert found == [base | change for change in changed]
    with pytest.raises(ValueError, match="block_size: got 24"):
        Choices(block_sizes=(16, 24))


# ---- drafts ------------------------------------------------------------------------------------


def test_acceptance_is_as_set() -> None:
    case, generator = Case(1000, 64, drafts=4, acceptance=0.8), torch.Generator().manual_seed(1)
    kept = kept_tokens(case, generator)
    assert kept.min() >= 1 and kept.max() == 5
    expected = 1 + sum(0.8**n for n in range(1, 5))
    assert kept.float().mean().item() == pytest.approx(expected, abs=0.2)
    all_of_them = kept_tokens(Case(7, 64, drafts=3, acceptance=1.0), generator)
    assert all_of_them.tolist() == [4] * 7


@torch.no_grad()
def test_a_round_keeps_what_was_drawn_of_every_row() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, budget=64)
    model(input_ids=prompt(300, 3), past_key_values=cache)
    case = Case(3, 300, drafts=4, acceptance=0.5)
    rounds = draft_rounds(model, case, cache)
    assert isinstance(rounds, SetRounds)
    before, drawn = (
        cache.offloaded[0].parts.frontier.lengths.clone(),
        torch.Generator().manual_seed(0),
    )
    expected = sum(kept_tokens(case, drawn) for _ in range(6))
    assert sum(rounds.run() for _ in range(6)) == int(expected.sum())
    assert [layer.parts.frontier.lengths.tolist() for layer in cache.offloaded] == [
        (before + expected).tolist()
    ] * len(cache.offloaded)
    found = rounds.report()
    assert found["accepted_share"] == (int(expected.sum()) - 18) / (6 * 3 * 4)
    assert found["tokens_per_round_range"] == [expected.min() / 6, expected.max() / 6]
    rounds.start()
    assert rounds.report()["accepted_share"] == 0


def test_scripts_repeat_themselves_less_from_row_to_row() -> None:
    text = script(4, 3000, 1000)
    assert text.shape == (4, 3000) and text.min() >= 1 and text.max() < 1000
    assert torch.equal(text, script(4, 3000, 1000)) and torch.equal(
        text[:, :99], script(4, 99, 1000)
    )
    different = [len({tuple(row[n : n + 3]) for n in range(2997)}) for row in text.tolist()]
    assert different == sorted(different) and different[0] < 2 * different[-1] / 3


@torch.no_grad()
def test_looked_up_drafts_are_accepted_where_the_script_goes_on_as_they_do() -> None:
    """Every round is real; rows keep what prompt lookup finds for each of them alone."""
    model = tiny_model("llama")
    cache = OasisCache(model, budget=64)
    model(input_ids=prompt(400, 3), past_key_values=cache)
    case = Case(3, 400, steps=12, drafts=4, acceptance="lookup")
    rounds = draft_rounds(model, case, cache)
    assert isinstance(rounds, LookupRounds)
    kept = [rounds.run() for _ in range(12)]
    offered, accepted = 0, []
    for row in rounds.script:
        text = Text(row[None, :402], torch.ones(1, 402, dtype=torch.bool), 0)
        for _ in range(12):
            drafts = PromptLookup(2).propose(text, 4)
            count, end = int(drafts.counts), int(text.ends)
            right = drafts.tokens[0, :count] == row[end : end + count]
            new = 1 + int(right.long().cumprod(0).sum())
            offered += count
            text.append(row[None, end : end + 5], torch.tensor([new]))
        accepted.append(int(text.ends) - 402 - 12)
    assert sum(kept) == sum(accepted) + 3 * 12
    found = rounds.report()
    assert found["accepted_share"] == pytest.approx(sum(accepted) / offered)
    low, high = found["tokens_per_round_range"]
    assert low == pytest.approx(1 + min(accepted) / 12) and high == pytest.approx(
        1 + max(accepted) / 12
    )
    assert 0.1 < found["accepted_share"] < 1 and high > low
    said = rounds.loop.text.ids
    for row, end in enumerate(rounds.loop.text.ends.tolist()):
        assert torch.equal(said[row, :end], rounds.script[row, :end])
    # All but the newest token have been fed.
    ends = (rounds.loop.text.ends - 1).tolist()
    assert [layer.parts.frontier.lengths.tolist() for layer in cache.offloaded] == [ends] * len(
        cache.offloaded
    )
    assert cache.stats().accepted == sum(accepted)


@pytest.mark.parametrize("acceptance", ["lookup", 0.8])
def test_a_row_of_drafts_says_what_came_of_them(
    acceptance: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole case on the CPU, whose clock is replaced."""

    def timed(run: Any, count: int) -> tuple[list[float], list[int]]:
        return [10.0] * count, [run() for _ in range(count)]

    monkeypatch.setattr(runner, "_timed", timed)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1 << 20)
    options = {"budget": 64, "index": "keys2bit", "on_miss": "skip", "fetch_cap": 0.0}
    case = Case(2, 600, "oasis", options, steps=6, drafts=3, acceptance=acceptance)
    row = runner.run_case(tiny_model("llama"), case, {"device_copy": 1e12, "link_copy": 1e10})
    assert json.loads(json.dumps(row))["acceptance"] == acceptance
    low, high = row["tokens_per_round_range"]
    assert 1 <= low <= row["tokens_per_round"] <= high <= 4
    assert row["tokens_per_round"] == pytest.approx((low + high) / 2)
    assert 0 < row["accepted_share"] <= 1
    assert row["link_ms"] == row["link_bytes_per_step"] == row["stats"]["cap_blocks"] == 0
    assert row["hbm_bytes_per_step"] > sum(weight_bytes(tiny_model("llama")).values())


def test_lookup_is_an_acceptance_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Case]] = []
    monkeypatch.setattr("oasis_hf.tools.bench.run", lambda shape, cases, *rest: asked.append(cases))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = "bench --quick --arms oasis --drafts 4 --acceptance lookup,0.6"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    assert {case.acceptance for case in asked[0] if case.drafts} == {"lookup", 0.6}


def test_a_shape_may_be_a_folder(tmp_path: Path) -> None:
    """Sizes of its config, that of the text where there are several; the head's may be implied."""
    config = tiny_model("llama").config
    config.save_pretrained(tmp_path)
    found = workload.shape_sizes(str(tmp_path))
    assert found == {name: getattr(config, name) for name in found}
    assert found.keys() == workload.SHAPES["llama-3.1-8b"].keys()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="num_attention_heads"):
        workload.shape_sizes(str(tmp_path))


# ---- filled caches -----------------------------------------------------------------------------


def test_every_layer_of_a_filled_cache_holds_the_same_context_and_decodes() -> None:
    model = tiny_model("llama")
    cache = workload.filled_cache(model, 2, 300, budget=64)
    first, second = (layer.history([300, 300]) for layer in cache.offloaded)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert first[0].std() > 0.5
    with torch.no_grad():
        logits = model(input_ids=prompt(1, 2), past_key_values=cache).logits
    assert torch.isfinite(logits).all()
    assert cache.get_seq_length() == 301


def test_static_and_dynamic_caches_are_filled_alike() -> None:
    model = tiny_model("llama")
    logits = []
    for arm in ("dense", "static"):
        torch.manual_seed(0)
        cache = arms.fill(model, Case(2, 200, arm))
        step = {"input_ids": prompt(1, 2), "position_ids": torch.full((2, 1), 200)}
        with torch.no_grad():
            logits.append(model(**step, past_key_values=cache).logits)
        assert int(cache.get_seq_length()) == 201
    torch.testing.assert_close(*logits)


def test_a_dense_step_is_sdpa_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    sdpa, masks = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        masks.append((kwargs["attn_mask"], kwargs.get("enable_gqa")))
        return sdpa(*args, **kwargs)

    case = Case(1, 64, "dense")
    step = arms.step_of(model, case, arms.fill(model, case))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        step(prompt(1), torch.tensor([[64]]))
    assert masks == [(None, True)] * model.config.num_hidden_layers


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
def test_predicted_bytes_are_the_weights_and_what_the_cache_reports(index: str) -> None:
    model = tiny_model("llama")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    cache = OasisCache(model, budget=64, index=index)
    assert predicted_bytes(cache, model) == weights
    with torch.no_grad():
        model(input_ids=prompt(100, 2), past_key_values=cache)
    held = cache.stats().hbm_bytes
    assert held > 0
    assert predicted_bytes(cache, model) == weights + held


def test_a_piece_takes_two_copies_of_one_layer_and_the_models_own_work() -> None:
    model = tiny_model("llama")
    cache, config = OasisCache(model, budget=64), model.config
    with torch.no_grad():
        model(input_ids=prompt(100, 2), past_key_values=cache)
    token = 2 * config.num_key_value_heads * config.head_dim * 4
    work = 2 * 2048 * (3 * config.intermediate_size + 5 * config.hidden_size) * 4
    assert predicted_piece_bytes(cache, model) == 2 * 100 * token + work
    assert [piece(batch) for batch in (1, 8, 32)] == [2048, 2048, 512]


# ---- rows --------------------------------------------------------------------------------------


def test_a_breakdown_ranks_kernels_per_step_and_sums_the_rest() -> None:
    found = [(f"kernel {number}", 10, float(number)) for number in range(1, 31)]
    rows = profiling.breakdown(found, 5)
    assert len(rows) == profiling.TOP + 1
    assert rows[0] == {"name": "kernel 30", "calls": 2, "us": 6, "share": 30 / 465}
    assert rows[-1]["name"] == "10 others"
    assert rows[-1]["calls"] == 20 and rows[-1]["us"] == pytest.approx(55 / 5)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert profiling.breakdown([], 5) == []


def test_a_dense_prompt_that_does_not_fit_is_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first_token(model: Any, tokens: int, oasis: Any, options: dict[str, Any]) -> dict[str, Any]:
        if oasis is None and not options:
            raise torch.OutOfMemoryError("tried to allocate")
        return {"seconds": 1.0, "peak_hbm_bytes": 5}

    monkeypatch.setattr(prompts, "_first_token", first_token)
    rows = list(prompts.first_tokens(tiny_model("llama"), 100))
    assert [(row["prompt"], row["run"], row["prefill_chunk_size"]) for row in rows] == [
        ("oasis", "first", 8192),
        ("oasis", "again", 8192),
        ("dense", "first", 16384),
    ]
    assert all("error" not in row and row["seconds"] == 1.0 for row in rows)


def run_with(monkeypatch: pytest.MonkeyPatch, cases: list[Case], **parts: Any) -> dict[str, Any]:
    """A run of the bench whose device parts are replaced."""
    usual: dict[str, Any] = {
        "environment": dict,
        "random_model": lambda *args: None,
        "measure": dict,
        "largest_difference": lambda *args: 0.0,
        "examine": lambda model, case, profile: {"piece": 1},
        "first_tokens": lambda model, tokens: iter([{"prompt": "oasis", "tokens": tokens}]),
    }
    for name, part in (usual | parts).items():
        monkeypatch.setattr(runner, name, part)
    reported: list[dict[str, Any]] = []
    record = runner.run("tiny", cases, [64], lambda row, record: reported.append(row))
    assert reported[1 : len(cases) + 1] == record["rows"]
    return record


def test_a_case_that_fails_becomes_a_row_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_case(model: Any, case: Case, ceilings: Any) -> dict[str, Any]:
        if case.arm == "static":
            raise torch.OutOfMemoryError("tried to allocate")
        return {"arm": case.arm, "ms_p50": 1.0}

    cases = [Case(1, 64, "static"), Case(1, 64, base=True)]
    record = run_with(monkeypatch, cases, run_case=run_case)
    failed, fine = record["rows"]
    assert failed["arm"] == "static" and failed["tokens"] == 64
    assert failed["error"] == "OutOfMemoryError: tried to allocate"
    assert fine["piece"] == 1 and "piece" not in failed
    assert record["prompts"] == [{"prompt": "oasis", "tokens": 64}]


def test_compiled_cases_have_a_gate_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def difference(model: Any, options: Any, engines: tuple[dict[str, Any], ...]) -> float:
        if any(engine.get("compile") for engine in engines):
            raise runner.GateFailedError("logits differ by 3")
        return 1e-6

    cases = [Case(1, 64), Case(1, 64, options={"compile": True})]
    record = run_with(
        monkeypatch,
        cases,
        largest_difference=difference,
        run_case=lambda model, case, ceilings: {"arm": "oasis"},
    )
    assert "error" not in record["rows"][0]
    assert "logits differ by 3" in record["rows"][1]["error"]
    checks = {"keys2bit", "keys2bit-fine", "keys2bit-skip", "pca", "minmax", "minmax8"}
    assert set(record["gate"]) == checks


def test_background_fetches_are_set_beside_the_step_without_them() -> None:
    """Of the same size, drafts and other options; whichever row comes first."""

    def row(ms: float, link: float, batch: int = 1, drafts: int = 0, **options: Any) -> Any:
        found = {"batch": batch, "tokens": 64, "options": BASE | options, "ms_p50": ms}
        return found | {"link_ms": link, "drafts": drafts, "acceptance": 0.8 if drafts else 0.0}

    rows = [
        row(9.0, 2.0),
        row(8.5, 0.0, fetch_cap=0.0),
        row(20.0, 16.0, fetch_cap=None),
        row(10.0, 1.0, on_miss="fetch"),
        row(7.0, 2.0, compile=True),
        row(12.0, 3.0, batch=8),
        row(11.0, 4.0, drafts=4),
        {"arm": "dense", "ms_p50": 100.0},
    ]
    for count in range(1, len(rows) + 1):
        overlap.compare(rows[:count])
    assert [row.get("exposed_ms") for row in rows] == [0.5, 0.0, 11.5, 1.5] + [None] * 4
    assert [row["overlap"] for row in rows[:4]] == [9 / 8.5, 1.0, 1.25, 10 / 8.5]
    rows.append(row(10.0, 0.0, drafts=4, fetch_cap=0))
    overlap.compare(rows)
    assert rows[6]["exposed_ms"] == 1.0 and rows[6]["overlap"] == 1.1


def test_a_run_keeps_what_the_fetches_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_case(model: Any, case: Case, ceilings: Any) -> dict[str, Any]:
        fetches = case.options["fetch_cap"] != 0
        return dataclasses.asdict(case) | {"ms_p50": 8.0 + fetches, "link_ms": 2.0 * fetches}

    cases = plan([(1, 4096)], ["oasis"], Choices(caps=(0.05, 0.0), compile=(False,)), 1)
    record = run_with(monkeypatch, cases, run_case=run_case)
    assert [row.get("exposed_ms") for row in record["rows"]][:3] == [1.0, 1.0, 0.0]
    assert [row.get("overlap") for row in record["rows"]][2] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "8"], "sizes: got '8', expected sequences and tokens of context"),
        (["--sizes", "1x512"], "more than 512"),
        (["--quick", "--sizes", "1x4096"], "leave one out"),
        (["--caps", "much"], "caps: got 'much', expected none, auto or a share"),
        (["--caps", "1.5"], "--caps: got 1.5"),
        (
            ["--shape", "./no-such"],
            "--shape: got './no-such', expected a folder with a model",
        ),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_options_that_cannot_be_used_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and message in result.output


def test_sizes_and_caps_reach_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Case]] = []
    monkeypatch.setattr("oasis_hf.tools.bench.run", lambda shape, cases, *rest: asked.append(cases))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = "--arms oasis --sizes 1x32768,8x131072 --indexes keys2bit --compile off --budgets 2048"
    caps = ["--caps", "0.01,0.05,none,auto,0"]
    result = CliRunner().invoke(app, ["bench", *words.split(), *caps])
    assert result.exit_code == 0, result.output
    (cases,) = asked
    assert [size_of(case) for case in cases if case.base] == [(1, 32768), (8, 131072)]
    found = [case.options["fetch_cap"] for case in cases if case.batch == 8]
    assert found == [0.05, 0.05, 0.01, None, "auto", 0.0]


def test_lines_say_what_a_row_holds() -> None:
    made = results()
    compiled = line(made["rows"][5])
    assert compiled.startswith("B1   130,560 oasis     2048 keys2bit skip compiled")
    assert "6.00" in compiled and "x2.00" in compiled and "18.0 GB" in compiled
    assert "True" not in compiled
    assert line(made["rows"][8]).endswith("OutOfMemoryError: no")
    capped = result_row(8, 32768, options={"fetch_cap": None}, exposed_ms=0.25, overlap=1.03)
    assert "skip cap none" in line(capped) and "exposed 0.25 ms, overlap 1.03" in line(capped)
    assert "copy 4.20 TB/s" in line({"ceilings": made["ceilings"]})
    first, dense, failed = map(line, made["prompts"])
    assert "oasis  first  in pieces of 8,192,  30.00 s to the first token" in first
    assert "at once" in dense and "50.0 GB" in dense
    assert failed.endswith("MemoryError: no")


def test_a_line_of_an_examined_case_has_its_kernels_below() -> None:
    kernels = profiling.breakdown([("scan", 64, 2000.0), ("plan", 32, 1000.0)], 2)
    found = {"batch": 8, "tokens": 130560, "piece": 2048, "profile": kernels}
    head, *rest = line(found | {"prompt_peak_hbm_bytes": 4e10, "prompt_peak_ratio": 1.25}).split(
        "\n"
    )
    assert "peak 40.0 GB, 1.25 x predicted" in head
    assert [row.split() for row in rest] == [
        ["1000.0", "us", "32.0", "calls", "66.7%", "scan"],
        ["500.0", "us", "16.0", "calls", "33.3%", "plan"],
    ]
    assert line(found | {"prompt_error": "MemoryError: no"}).split("\n")[0].endswith("Error: no")
