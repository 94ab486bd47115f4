"""The needle evaluation: prompts, arms, a run on a tiny model, and the table of the README."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_helpers import character_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

FOLDER = Path(__file__).parent.parent / "eval"
sys.path.insert(0, str(FOLDER))

import arms  # noqa: E402
import haystack  # noqa: E402
import mass  # noqa: E402
import needles  # noqa: E402
import summary  # noqa: E402
import tables  # noqa: E402
import typer  # noqa: E402

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


def run(app: Any, *words: str) -> Any:
    command = typer.Typer()
    command.command()(app)
    return CliRunner().invoke(command, words, catch_exceptions=False)


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
    names = {arm.name for arm in arms.plan(["keys2bit", "minmax"], ["fetch", "0.01"], [32, 64])}
    assert names == {
        *(f"keys2bit/{miss}/{budget}" for miss in ("fetch", "0.01") for budget in (32, 64)),
        *(f"minmax/fetch/{budget}" for budget in (32, 64)),
    }


@pytest.mark.parametrize(
    ("hits", "total", "interval"),
    [(16, 16, (0.806, 1.0)), (15, 16, (0.717, 0.989)), (8, 16, (0.280, 0.720)), (0, 0, (0, 1))],
)
def test_wilson_intervals(hits: int, total: int, interval: tuple[float, float]) -> None:
    assert summary.wilson(hits, total) == pytest.approx(interval, abs=1e-3)


@pytest.mark.parametrize(
    ("index", "bits"), [("keys2bit", 3), ("minmax", 2), ("mean", 1), ("streaming", 0)]
)
def test_index_bits(index: str, bits: float) -> None:
    assert summary.index_bits(index) == bits


# ---- a run -------------------------------------------------------------------------------------


@pytest.fixture
def command(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """A short run on the tiny model, every answer of which counts as right."""
    monkeypatch.setattr(needles, "smollm2", lambda: "tiny")
    monkeypatch.setattr(needles, "load", lambda source: (model, tokenizer))
    monkeypatch.setattr(haystack.Needle, "answer", property(lambda needle: ""))
    (tmp_path / "text.txt").write_text(TEXT)
    words = "--contexts 400 --budgets 32 --indexes keys2bit,minmax --policies fetch,0.01"
    where = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "needles.json")]
    return [*words.split(), "--needles", "3", "--rows", "2", *where]


def test_a_run_and_its_resumption(command: list[str], tmp_path: Path) -> None:
    out = run(needles.main, *command).stdout
    assert out.count("read") == 2
    report = json.loads((tmp_path / "needles.json").read_text())
    assert report["dense"] == [
        {"context": 400, "hits": 3, "of": 3, "interval": list(summary.wilson(3, 3))}
    ]
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
    again = run(needles.main, *command, "--resume").stdout
    assert again.count("read") == 1 and again.count("/fetch/") == 1
    assert json.loads((tmp_path / "needles.json").read_text())["cells"] == report["cells"]


def test_dense_and_a_budget_for_everything_answer_alike(model: Any, tokenizer: Any) -> None:
    batch = haystack.Haystack(tokenizer, TEXT, 400, 0).batch(0, 2)
    last = batch.lead_in[:, -1:]
    with torch.inference_mode():
        base = arms.read(model, batch)
        dense, sparse = (
            arms.run_arm(model, tokenizer, base, arm, last, batch.limit, {})
            for arm in (arms.DENSE, arms.Arm("minmax", "fetch", 512))
        )
    assert dense["answers"] == sparse["answers"]
    assert sparse["attended"] == batch.tokens + (sparse["steps"] - 1) / 2


def test_what_was_read_can_be_kept(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    batch = haystack.Haystack(tokenizer, TEXT, 400, 0).batch(0, 2)
    with torch.inference_mode():
        first, kept = (arms.read(model, batch, tmp_path) for _ in range(2))
    assert len(list(tmp_path.iterdir())) == 1
    assert kept.get_seq_length() == first.get_seq_length() == batch.tokens - 1


def test_the_mass_that_a_full_budget_holds_is_all(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(TEXT[:300], return_tensors="pt").input_ids
    with torch.inference_mode():
        layers = mass.capture(model, ids, steps=4)
        full, small = (
            mass.replay(layers[0], mass.Choice(budget=budget))[0] for budget in (512, 32)
        )
    assert full == pytest.approx(1, abs=1e-4)
    assert small < full


# ---- tables ------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A summary of made-up answers."""
    counts = dict.fromkeys(summary.MEANS, 0.125) | {"seconds": 1, "together": 1}
    samples = [
        {"context": 400, "arm": {"index": index, "on_miss": miss, "budget": 32}, "hit": hit}
        for index, miss, hits in [
            ("dense", "none", [True, True]),
            ("minmax", "fetch", [False, True]),
            ("keys2bit", "fetch", [True, True]),
        ]
        for hit in hits
    ]
    names = "device cpus threads model dtype command commit date python torch transformers"
    about = dict.fromkeys(names.split(), "x")
    path = tmp_path / "needles.json"
    path.write_text(json.dumps(summary.summarise(about, [s | counts for s in samples])))
    return path


def test_the_readme_holds_exactly_the_table(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- needles:begin -->\nold\n<!-- needles:end -->\nafter\n")
    where = ["needles", "--results", str(results), "--page", str(page)]
    assert run(tables.main, *where, "--check").exit_code == 1
    assert run(tables.main, *where, "--write").exit_code == 0
    assert run(tables.main, *where, "--check").exit_code == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "| 2-bit keys (`keys2bit`) | fetched | 3 | 2/2 |" in text
    assert "| min/max of a block (`minmax`) | fetched | 2 | 1/2 |" in text


def test_a_page_without_markers_is_an_error(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("no table here")
    with pytest.raises(ValueError, match="needles:begin"):
        run(tables.main, "needles", "--results", str(results), "--page", str(page), "--check")
