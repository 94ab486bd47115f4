"""The adapter for lm-evaluation-harness, on a task that lies in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")

from eval_helpers import TEXT, character_tokenizer, tiny_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from oasis_eval import harness  # noqa: E402
from oasis_hf import OasisCache  # noqa: E402
from oasis_hf.config import OasisConfigError  # noqa: E402

TASK = """
task: continue_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["@"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task of three prompts of different lengths."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "prompts.jsonl"
    rows = [{"text": TEXT[start : start + 500 + start], "target": "x"} for start in (0, 40, 90)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "continue_text.yaml").write_text(TASK.format(file=file))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def answers(model: Any, tasks: Any) -> list[str]:
    """What a model answers to the task's prompts."""
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["continue_text"],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
    )
    return [row["resps"][0][0] for row in found["samples"]["continue_text"]]


def test_a_budget_for_everything_answers_as_the_harness_own_model_does(
    tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, tokenizer = tiny_model(), character_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    shared = {"tokenizer": tokenizer, "batch_size": 2, "max_length": 1024}
    plain = answers(HFLM(pretrained=model, **shared), tasks)
    made: list[OasisCache] = []

    def cache(*args: Any, **options: Any) -> OasisCache:
        made.append(OasisCache(*args, **options))
        return made[-1]

    monkeypatch.setattr(harness, "OasisCache", cache)
    full = answers(harness.OasisLM(pretrained=model, budget=1024, **shared), tasks)
    assert full == plain and len(set(plain)) == 3
    # Three prompts in batches of two: each batch has a cache of its own.
    assert len(made) == 2
    few = answers(harness.OasisLM(pretrained=model, budget=32, index="streaming", **shared), tasks)
    assert few != plain and made[-1].oasis_config.budget == 32


def test_an_option_that_cannot_be_used_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(OasisConfigError, match="budget: got 100"):
        harness.OasisLM(pretrained="no/such-model", budget=100)


def test_the_harness_knows_the_model_by_name() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("oasis") is harness.OasisLM
