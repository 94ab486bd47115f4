"""The study of indexes over alike needles: its prompts, what it measures, and its summary."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

from eval_helpers import TEXT, character_tokenizer, tiny_model
from typer.testing import CliRunner

from oasis_eval.arms import DENSE, parse
from oasis_eval.runs.session import DEFAULTS, read
from oasis_eval.studies import alike_needles
from oasis_eval.studies.alike_needles import Asked, arms, ask, measure, summary, table
from oasis_hf.cli import app

TASK, CONTEXT = "niah_multikey_3", 900


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny_model()


@pytest.fixture(scope="module")
def asked(tokenizer: Any) -> list[Asked]:
    return ask(tokenizer, TASK, CONTEXT, samples=2, seed=1, text=TEXT)


def written(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_the_answer_is_what_the_text_says_of_the_key(tokenizer: Any, asked: list[Asked]) -> None:
    for one in asked:
        prompt, value = (written(tokenizer, ids) for ids in (one.prompt, one.answer))
        key = prompt.rsplit(" mentioned in", 1)[0].rsplit(" ", 1)[1]
        assert f"magic uuids for {key} is: {value}." in prompt
        assert prompt.endswith(
            f"The special magic uuid for {key} mentioned in the provided text is "
        )
        assert len(one.prompt) + len(one.answer) <= CONTEXT
    assert asked[0].answer != asked[1].answer


def test_the_dense_record_is_that_of_one_forward(model: Any, asked: list[Asked]) -> None:
    (record,) = measure(model, asked[:1], [], tell=lambda text: None)
    ids = torch.tensor([asked[0].prompt + asked[0].answer])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(asked[0].prompt) - 1 : -1]
    answer = torch.tensor(asked[0].answer)
    expected = -torch.nn.functional.cross_entropy(logits, answer, reduction="sum")
    assert record["log_probability"] == pytest.approx(expected.item(), abs=1e-2)
    right = (logits.argmax(-1) == answer).float().mean().item()
    assert record["right"] == pytest.approx(right, abs=1e-4)


def test_a_budget_for_everything_gives_dense_attention_and_a_small_one_does_not(
    model: Any, asked: list[Asked]
) -> None:
    compared = arms(["oracle", "pca", "minmax", "streaming"], [1024, 32])
    records = measure(model, asked[:1], compared, tell=lambda text: None)
    dense, *others = (record["log_probability"] for record in records)
    for arm, found in zip(compared, others, strict=True):
        assert (abs(found - dense) < 1e-2) == (arm.budget == 1024), arm.name


def test_an_arm_that_learns_goes_on_with_what_the_prompt_taught(
    model: Any, asked: list[Asked]
) -> None:
    with torch.no_grad():
        base = read(model, torch.tensor([asked[0].prompt]), index="pca")
    arm = base.fork(**(DEFAULTS | parse("pca/fetch/64").options))
    seen = [cache.offloaded[0].parts.index.learned["queries"].item() for cache in (base, arm)]
    assert seen[0] == seen[1] > len(asked[0].prompt)


def test_all_indexes_of_a_budget_have_blocks_of_one_size() -> None:
    sizes = {
        (arm.budget, arm.options["block_size"]) for arm in arms(["oracle", "pca"], [2048, 512])
    }
    assert sizes == {(2048, 16), (512, 8)}
    assert len(arms(["pca", "pca"], [64, 64])) == 1


def test_differences_are_paired_and_to_the_oracle_of_the_same_budget() -> None:
    names = ["dense", "oracle/fetch/64", "pca/fetch/64", "pca/fetch/32"]
    values = {"dense": (-1, -10), names[1]: (-2, -12), names[2]: (-4, -14), names[3]: (-9, -19)}
    records = [
        {"arm": name, "budget": (DENSE if name == "dense" else parse(name)).budget, "right": 0.5}
        | {"sample": sample, "log_probability": values[name][sample]}
        for sample in (0, 1)
        for name in names
    ]
    dense, oracle, pca, other = summary(records)
    assert dense["log_probability"] == -5.5 and "to_dense" not in dense
    assert oracle["to_dense"]["mean"] == -1.5 and "to_oracle" not in oracle
    assert pca["to_oracle"] == {"mean": -2, "low": -2, "high": -2, "count": 2}
    assert pca["to_dense"]["mean"] == -3.5 and "to_oracle" not in other
    shown = table([dense, oracle, pca, other])
    assert "pca 64" in shown and "-2.0 (-2.0 to -2.0)" in shown
    assert max(map(len, shown.split("\n"))) <= 80


def test_the_command_prints_a_table_and_writes_records(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alike_needles, "smollm2", lambda: "tiny")
    monkeypatch.setattr(alike_needles, "load", lambda source: (model, tokenizer))
    parts = (model.config, tokenizer)
    monkeypatch.setattr("oasis_hf.cli.checks.model_parts", lambda *args: parts)
    text, out = tmp_path / "text.txt", tmp_path / "alike.json"
    text.write_text(TEXT)
    words = ["--context", str(CONTEXT), "--samples", "2", "--budgets", "64", "--text", str(text)]
    more = ["--indexes", "oracle,eval_helpers:Backwards", "--out", str(out)]
    ran = CliRunner().invoke(app, ["study", "index", *words, *more], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:]] == [
        "dense",
        "oracle",
        "Backwards",
    ]
    found = json.loads(out.read_text())
    assert {"commit", "model", "task", "seed", "command"} <= set(found["about"])
    assert str(tmp_path) not in out.read_text()
    assert [(r["sample"], r["arm"].split("/")[0]) for r in found["records"]] == [
        (sample, arm) for sample in (0, 1) for arm in ("dense", "oracle", "eval_helpers:Backwards")
    ]
