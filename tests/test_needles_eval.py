"""The study over needles: prompts, arms, and a run on a tiny model; attention held by choices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_helpers import character_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from oasis_eval.arms import DENSE, parse
from oasis_eval.intervals import wilson
from oasis_eval.needles import haystack
from oasis_eval.needles import run as needles
from oasis_eval.needles.plan import plan
from oasis_eval.needles.summary import index_bits
from oasis_eval.runs.replay import replay
from oasis_eval.runs.session import Session
from oasis_eval.studies import attention_held
from oasis_hf.cli import app

TEXT = " ".join(f"Sentence number {n} tells about nothing in particular." for n in range(200))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        attn_implementation="oasis",
    )
    return LlamaForCausalLM(config).eval()


def study(*words: str) -> Any:
    return CliRunner().invoke(app, ["study", *words], catch_exceptions=False)


# ---- prompts -----------------------------------------------------------------------------------


def test_prompts_of_a_batch_are_equally_long_and_hold_their_needle(tokenizer: Any) -> None:
    batch = haystack.Haystack(tokenizer, TEXT, 600, seed=1).batch(first=3, rows=4)
    assert 560 < batch.tokens <= 600 - haystack.NUMBER_TOKENS
    for needle, ids, start in zip(batch.needles, batch.ids, batch.lead_in, strict=True):
        text = "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))
        assert needle.sentence in text and text.endswith(needle.question)
        assert "".join(tokenizer.convert_ids_to_tokens(start.tolist())).endswith("text is ")


def test_the_same_seed_gives_the_same_needles_in_any_batch(tokenizer: Any) -> None:
    first = haystack.Haystack(tokenizer, TEXT, 600, seed=1).batch(0, 4)
    again = haystack.Haystack(tokenizer, TEXT, 600, seed=1).batch(2, 2)
    other = haystack.Haystack(tokenizer, TEXT, 600, seed=2).batch(2, 2)
    assert first.needles[2:] == again.needles != other.needles


def test_the_text_that_is_read_does_not_depend_on_the_lead_in(tokenizer: Any) -> None:
    given, asked = (
        haystack.Haystack(tokenizer, TEXT, 600, 1, lead_in=lead).batch(0, 2)
        for lead in (True, False)
    )
    assert torch.equal(given.ids, asked.ids)
    assert asked.lead_in.shape == (2, 0)
    assert asked.limit == given.limit + given.lead_in.shape[1]


# ---- arms and figures --------------------------------------------------------------------------


def test_thresholds_only_where_the_index_estimates_mass() -> None:
    names = {arm.name for arm in plan(["keys2bit", "minmax"], ["fetch", "0.01"], [32, 64])}
    assert names == {
        *(f"keys2bit/{miss}/{budget}" for miss in ("fetch", "0.01") for budget in (32, 64)),
        *(f"minmax/fetch/{budget}" for budget in (32, 64)),
    }


@pytest.mark.parametrize(
    ("hits", "total", "interval"),
    [(16, 16, (0.806, 1.0)), (15, 16, (0.717, 0.989)), (8, 16, (0.280, 0.720)), (0, 0, (0, 1))],
)
def test_wilson_intervals(hits: int, total: int, interval: tuple[float, float]) -> None:
    assert wilson(hits, total) == pytest.approx(interval, abs=1e-3)


@pytest.mark.parametrize(
    ("index", "bits"), [("keys2bit", 3), ("minmax", 2), ("mean", 1), ("streaming", 0)]
)
def test_index_bits(index: str, bits: float) -> None:
    assert index_bits(index) == bits


# ---- a run -------------------------------------------------------------------------------------


@pytest.fixture
def command(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """A short run on the tiny model, every answer of which counts as right."""
    monkeypatch.setattr(needles, "smollm2", lambda: "tiny")
    monkeypatch.setattr(needles, "load", lambda source: (model, tokenizer))
    parts = (model.config, tokenizer)
    monkeypatch.setattr("oasis_hf.cli.checks.model_parts", lambda *args: parts)
    monkeypatch.setattr(haystack.Needle, "answer", property(lambda needle: ""))
    (tmp_path / "text.txt").write_text(TEXT)
    words = "--contexts 400 --budgets 32 --indexes keys2bit,minmax --policies fetch,0.01"
    where = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "needles.json")]
    return [*words.split(), "--needles", "3", "--rows", "2", *where]


def test_a_run_and_its_resumption(command: list[str], tmp_path: Path) -> None:
    out = study("needles", *command).output
    assert out.count("read") == 2
    report = json.loads((tmp_path / "needles.json").read_text())
    assert report["dense"] == [{"context": 400, "hits": 3, "of": 3, "interval": list(wilson(3, 3))}]
    assert {(c["index"], c["on_miss"], c["of"]) for c in report["cells"]} == {
        ("keys2bit", "fetch", 3),
        ("keys2bit", "0.01", 3),
        ("minmax", "fetch", 3),
    }
    assert str(tmp_path) not in json.dumps(report)
    lines = (tmp_path / "needles.jsonl").read_text().count("\n")
    assert lines == 3 * (1 + 3)

    log = tmp_path / "needles.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    again = study("needles", *command, "--resume").output
    assert again.count("read") == 1 and again.count("/fetch/") == 1
    assert json.loads((tmp_path / "needles.json").read_text())["cells"] == report["cells"]


def test_dense_and_a_budget_for_everything_answer_alike(model: Any, tokenizer: Any) -> None:
    batch = haystack.Haystack(tokenizer, TEXT, 400, 0).batch(0, 2)
    with torch.inference_mode():
        session = Session(model, batch.prompts[:, :-1].tolist(), exact=True)
        dense, sparse = (
            needles.answered(session, tokenizer, batch, arm, [0, 1])
            for arm in (DENSE, parse("minmax/fetch/512"))
        )
    assert [x["answer"] for x in dense] == [x["answer"] for x in sparse]
    # From its last token on, a prompt that is attended to as a whole grows by one token a step.
    assert batch.tokens <= sparse[0]["attended"] < batch.tokens + batch.limit


@pytest.mark.parametrize("arm", ["dense", "keys2bit/fetch/32"])
def test_rows_that_are_kept_answer_as_they_do_alone(model: Any, tokenizer: Any, arm: str) -> None:
    batch = haystack.Haystack(tokenizer, TEXT, 400, 0).batch(0, 3)
    ids = batch.prompts[:, :-1].tolist()
    with torch.inference_mode():
        session, alone = Session(model, ids, exact=True), Session(model, [ids[2]], exact=True)
        session.keep([2, 0])
        kept = needles.answered(session, tokenizer, batch, parse(arm), [2, 0])
        own = needles.answered(alone, tokenizer, batch, parse(arm), [2])
    assert kept[0]["answer"] == own[0]["answer"]
    assert [record["needle"] for record in kept] == [2, 0]


def test_options_of_the_cache_reach_every_arm() -> None:
    (arm,) = plan(["keys2bit"], ["fetch"], [32], options="block_size=8/head_room=1")
    assert (arm.options["block_size"], arm.options["head_room"]) == (8, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budgets", "12x"], "--budgets: got '12x', expected tokens"),
        (["--indexes", ""], "--indexes: got ''"),
        (["--indexes", "best"], "arms: got index 'best', expected one of"),
        (["--options", "size=8"], "arms: got 'size'"),
        (["--indexes", "minmax", "--policies", "0.01"], "policies: got 0.01, under which none"),
        (["--dtype", "int8"], "dtype: got 'int8', expected float32 or bfloat16"),
        (["--text", "/no/such.txt"], "/no/such.txt"),
    ],
)
def test_choices_that_cannot_be_used_are_named(
    words: list[str], message: str, tmp_path: Path
) -> None:
    ran = study("needles", *words, "--out", str(tmp_path / "needles.json"))
    assert ran.exit_code == 2 and message in ran.output
    assert not list(tmp_path.iterdir())


# ---- attention held ----------------------------------------------------------------------------


def test_the_mass_that_a_full_budget_holds_is_all(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(TEXT[:300], return_tensors="pt").input_ids
    with torch.inference_mode():
        layers = attention_held.capture(model, ids, steps=4)
        full, small = (
            replay(layers[0], attention_held.Choice(budget=budget).config).mass.mean().item()
            for budget in (512, 32)
        )
    assert full == pytest.approx(1, abs=1e-4)
    assert small < full


def test_every_choice_is_measured_and_written(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_held, "smollm2", lambda: "tiny")
    monkeypatch.setattr(attention_held, "load", lambda source: (model, tokenizer))
    parts = (model.config, tokenizer)
    monkeypatch.setattr("oasis_hf.cli.checks.model_parts", lambda *args: parts)
    out = tmp_path / "mass.json"
    words = ["--context", "400", "--steps", "2", "--budgets", "32,64", "--indexes", "keys2bit"]
    ran = study("attention", *words, "--out", str(out))
    assert ran.exit_code == 0, ran.output
    rows = json.loads(out.read_text())["choices"]
    assert {"block_size 16", "on_miss skip", "reduction max"} <= {row["changes"] for row in rows}
    budgets = {
        row["changes"]: [r["budget"] for r in rows if r["changes"] == row["changes"]]
        for row in rows
    }
    assert budgets["block_size 16"] == [32, 64] and budgets["sink_tokens 64"] == [64]
    assert all(0 < row["worst"] <= row["mean"] <= 1 for row in rows)
