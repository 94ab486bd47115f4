"""A run: every arm on every sample, resumption, the command line, and that it can fail."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

from eval_helpers import TEXT, Backwards, character_tokenizer, dropping, tiny_model
from typer.testing import CliRunner

from oasis_eval.arms import DENSE, Arm, parse
from oasis_eval.config import ConfigError, EvalConfig, resolve
from oasis_eval.material.prose import Prose
from oasis_eval.material.texts import read_text
from oasis_eval.reports.page import write_report
from oasis_eval.runs.run import evaluated, identity, run
from oasis_eval.runs.session import Session, answer
from oasis_eval.tasks import sample
from oasis_eval.tasks.prompt import opening, plain
from oasis_hf.cli import app
from oasis_hf.config import OasisConfig
from oasis_hf.tools import packaged

ORACLE, FULL = "oracle/fetch/64", "keys2bit/fetch/1536"
SMALL = {
    "tasks": ["niah_single_2", "ask_again", "language"],
    "contexts": [1300],
    "arms": [ORACLE, FULL],
    "samples": 2,
    "answer_tokens": 8,
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return tiny_model(), character_tokenizer()


@pytest.fixture
def config(tmp_path: Path) -> EvalConfig:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return resolve(flags=SMALL | {"text": str(text)})


def by_arm(records: list[dict[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """One value by arm and sample."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if name in record:
            found.setdefault(record["arm"], {})[f"{record['task']} {record['number']}"] = record[
                name
            ]
    return found


# ---- a run -------------------------------------------------------------------------------------


def test_every_arm_answers_every_sample_dense_first(
    pair: Any, config: EvalConfig, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    records = run(config, tmp_path / "run", lambda done, total, _: seen.append((done, total)), pair)
    assert seen == [(n, 18) for n in range(1, 19)]
    # The two samples of a question are answered together.
    together, alone = ["dense"] * 2 + [ORACLE] * 2 + [FULL] * 2, ["dense", ORACLE, FULL]
    assert [record["arm"] for record in records] == together + alone * 4
    assert all(
        len(r["answers"]) == (5 if r["task"] == "ask_again" else 1)
        for r in records
        if "answers" in r
    )
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["config"]["samples"] == 2 and about["versions"]["torch"] == torch.__version__
    assert about["commit"] and about["device"] == "cpu"


def test_a_budget_for_everything_answers_as_dense_does(
    pair: Any, config: EvalConfig, tmp_path: Path
) -> None:
    records = run(config, tmp_path / "run", None, pair)
    ids = by_arm(records, "answers")
    assert ids[FULL] == ids["dense"]
    (first, *_) = [r for r in records if r["arm"] == FULL and r["task"] == "language"]
    assert first["mass"] == pytest.approx(1, abs=1e-4) and first["recall_min"] == 1
    assert first["kl"] == pytest.approx(0, abs=1e-5) and first["first_divergence"] is None
    losses = by_arm(records, "loss")
    assert losses[FULL] == pytest.approx(losses["dense"], abs=1e-4)


def test_an_interrupted_run_is_completed(pair: Any, config: EvalConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = run(config, out, None, pair)
    log = out / "samples.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    # Interrupted within a line: what was being written is done again.
    log.write_text("".join(lines[:-3]) + lines[-3][:20])
    seen: list[int] = []
    again = run(config, out, lambda done, *_: seen.append(done), pair)
    assert seen == [16, 17, 18]
    assert plain_of(whole) == plain_of(again)
    assert len(log.read_text().splitlines()) == 18
    seen.clear()
    run(config, out, lambda done, *_: seen.append(done), pair)
    assert not seen


def plain_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results without their times."""
    return [{k: v for k, v in r.items() if k not in ("seconds", "reading")} for r in records]


def test_samples_answered_together_answer_as_alone(
    pair: Any, config: EvalConfig, tmp_path: Path
) -> None:
    several = resolve(flags=config.as_dict() | {"samples": 5, "tasks": ["niah_single_2", "vt"]})
    alone, together = (
        run(several, tmp_path / f"by {batch}", None, pair, batch=batch) for batch in (1, 3)
    )
    assert {record["rows"] for record in alone} == {1}
    assert max(record["rows"] for record in together) == 3
    names = ("score", "answers", "ids", "references", "answer_tokens", "tokens")

    def by_sample(records: list[dict[str, Any]]) -> dict[Any, Any]:
        return {identity(record): [record[name] for name in names] for record in records}

    assert by_sample(alone) == by_sample(together)


def test_a_run_ends_in_time_and_goes_on(pair: Any, config: EvalConfig, tmp_path: Path) -> None:
    cut = run(config, tmp_path / "run", None, pair, seconds=0)
    assert 0 < len(cut) < 18
    assert write_report(tmp_path / "run").exists()
    assert len(run(config, tmp_path / "run", None, pair)) == 18


def test_a_folder_of_another_config_is_refused(
    pair: Any, config: EvalConfig, tmp_path: Path
) -> None:
    run(config, tmp_path / "run", None, pair)
    other = resolve(flags=config.as_dict() | {"seed": 3})
    with pytest.raises(ConfigError, match="holds a run with other seed"):
        run(other, tmp_path / "run", None, pair)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"contexts": [4096]}, "got 4096, but the model has 2048"), ({"tasks": ["cwe"]}, "cwe: ")],
)
def test_contexts_that_do_not_fit_are_refused(
    pair: Any, config: EvalConfig, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(resolve(flags=config.as_dict() | change), tmp_path / "run", None, pair)


def test_what_was_answered_is_in_the_cache_when_the_next_question_comes(pair: Any) -> None:
    model, tokenizer = pair
    ids = plain(tokenizer, TEXT[:300])
    with torch.inference_mode():
        session = Session(model, [ids[:-1]])
        for arm in (DENSE, parse(FULL)):
            cache = session.cache(arm)
            (found,) = answer(model, tokenizer, cache, [ids[-1:]], 5, [lambda text: False])
            assert cache.get_seq_length() + len(found.pending) == len(ids) + len(found.ids)


@pytest.mark.parametrize("block", [16, 32])
def test_an_arm_has_its_own_options_and_defaults_for_the_rest(pair: Any, block: int) -> None:
    """Whether it borrows what was read or, for other blocks, copies it."""
    model, tokenizer = pair
    with torch.inference_mode():
        session = Session(model, [plain(tokenizer, TEXT[:300])] * 2)
        cache = session.cache(parse(f"mean/fetch/64/block_size={block}"))
    options = {"index": "mean", "on_miss": "fetch", "budget": 64, "block_size": block}
    options["fetch_cap"] = 0.05
    assert cache.oasis_config == OasisConfig(**options)
    own, read = (
        side.offloaded[0].parts.store.slabs[0].data_ptr() for side in (cache, session.base)
    )
    assert (own == read) == (block == 16) and cache.get_seq_length() == 300


def test_an_arm_may_keep_layers_dense(pair: Any, config: EvalConfig) -> None:
    found = sample("language", pair[1], 600, 0, 0, Prose(TEXT))
    arms = [DENSE, parse("streaming/fetch/32"), parse("streaming/fetch/32/dense_layers=[0]")]
    with torch.inference_mode():
        _, (none,), (one,) = evaluated(*pair, [found], arms, config)
    assert none["kl"] > one["kl"] > 0 and none["mass"] < one["mass"]
    assert one["mass_by_layer"][0] == one["recall_by_layer"][0] == 1 > one["mass_by_layer"][1]
    assert one["mass_by_layer"][1] == none["mass_by_layer"][1] > 0
    assert none["hbm_bytes"] < one["hbm_bytes"]


# ---- the harness can fail ----------------------------------------------------------------------


def test_fidelity_tells_a_broken_selector(pair: Any, config: EvalConfig) -> None:
    found = sample("language", pair[1], 1300, 0, 0, Prose(TEXT))
    # Without sinks, which take the place of blocks that hold more.
    oracle = parse(f"{ORACLE}/sink_tokens=0")
    arms = [DENSE, oracle, Arm("backwards", oracle.options | {"index": Backwards})]
    with torch.inference_mode():
        _, (true,), (wrong,) = evaluated(*pair, [found], arms, config)
    assert true["recall"] > 0.99 and wrong["recall"] < 0.4
    assert wrong["mass"] < true["mass"]
    assert wrong["kl"] > true["kl"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
)
def test_selectors_that_are_broken_lose_the_needle() -> None:
    model, tokenizer = packaged.load(packaged.smollm2(), dtype=torch.float32, device_map="cpu")
    prose = Prose(read_text("reference"))
    config = EvalConfig(answer_tokens=8)
    scores: dict[str, list[float]] = {}
    for number in range(3):
        found = sample("niah_single_2", tokenizer, 1024, number, 0, prose)
        options = parse("oracle/fetch/256").options
        drops = dropping(*needle_blocks(tokenizer, found))
        arms = [
            DENSE,
            Arm("oracle", options),
            Arm("backwards", options | {"index": Backwards}),
            Arm("dropping", options | {"index": drops}),
        ]
        with torch.inference_mode():
            for (record,) in evaluated(model, tokenizer, [found], arms, config):
                scores.setdefault(record["arm"], []).append(record["score"])
    assert sum(scores["dense"]) >= 2 and scores["oracle"] == scores["dense"]
    assert sum(scores["backwards"]) == 0
    assert sum(scores["dropping"]) == 0


def needle_blocks(tokenizer: Any, found: dict[str, Any]) -> tuple[int, int]:
    """The first and last block of 16 tokens that the needle is in."""
    (turn,) = found["turns"]
    ids = opening(tokenizer, found["text"], turn["question"], turn["lead_in"])
    digits = plain(tokenizer, turn["references"][0])
    place = next(n for n in range(len(ids)) if ids[n : n + len(digits)] == digits)
    return max(0, place - 24) // 16, (place + len(digits)) // 16


# ---- the command line --------------------------------------------------------------------------


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_eval_and_report_from_any_folder(
    runner: CliRunner,
    pair: Any,
    config: EvalConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oasis_eval.runs.run.smollm2", lambda: "tiny")
    monkeypatch.setattr("oasis_eval.runs.run.load", lambda source: pair)
    parts = (pair[0].config, pair[1])
    monkeypatch.setattr("oasis_hf.cli.checks.model_parts", lambda *args: parts)
    words = ["--tasks", "niah_single_2", "--contexts", "700", "--samples", "1", "--cut", "4"]
    words += ["--text", config.text, "--arms", ORACLE]
    done = runner.invoke(app, ["eval", *words, "--out", "one"], catch_exceptions=False)
    assert done.exit_code == 0 and f"| `{ORACLE}` |" in done.output
    assert {p.name for p in Path("one").iterdir()} >= {"config.json", "samples.jsonl", "report.md"}
    assert runner.invoke(app, ["eval", *words]).exit_code == 0
    (other,) = Path("oasis-eval").iterdir()
    compared = runner.invoke(app, ["report", "one", str(other), "--out", "both.md"])
    assert compared.exit_code == 0 and "B - A" in Path("both.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
)
def test_the_tiny_preset_with_the_packaged_model(runner: CliRunner, tmp_path: Path) -> None:
    """What a user sees first, end to end; an eighth of the context finds what the newest do not."""
    words = ["eval", "--preset", "tiny", "--text", "reference", "--out", str(tmp_path)]
    done = runner.invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "| `keys2bit/fetch/128` |" in done.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    score = {cell["arm"]: cell["mean"] for cell in summary["scores"]}
    assert score == {"dense": 1, "keys2bit/fetch/128": 1, "streaming/fetch/128": 0}
    mass = {cell["arm"]: cell["mass"] for cell in summary["fidelity"] if "mass" in cell}
    assert mass["keys2bit/fetch/128"] > mass["streaming/fetch/128"] + 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--preset", "huge"], "preset: got 'huge'"),
        (["eval", "--tasks", "nih"], "tasks: got 'nih'"),
        (["report", "nowhere"], "nowhere holds no config.json"),
    ],
)
def test_mistakes_are_explained(runner: CliRunner, arguments: list[str], message: str) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2 and message in done.output


def test_what_is_missing_can_be_installed(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = runner.invoke(app, ["eval"])
    assert done.exit_code == 1 and "pip install 'oasis-hf[eval]'" in done.output
