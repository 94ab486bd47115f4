"""What the cache does with every causal language model of the installed Transformers."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from oasis_hf import OasisCache, OasisUnsupportedError
from oasis_hf.cli import app
from oasis_hf.facts import compat
from oasis_hf.facts.handle import take_pending
from oasis_hf.tools import tiny
from oasis_hf.tools.survey import EXACT, PARTLY, REFUSED, UNTESTABLE, WRONG, survey

EXACTLY = """
apertus arcee bitnet cohere dots1 ernie4_5 ernie4_5_moe gemma glm glm4 glm4_moe gpt2 gpt_neox
granite granitemoe helium hunyuan_v1_dense hy_v3 llama minimax_m2 ministral3 mistral mixtral
nemotron olmo olmo2 olmoe opt phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
solar_open stablelm starcoder2
"""
"""Served with all layers offloaded."""

IN_PART = """
bamba cohere2 exaone4 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text granitemoehybrid jamba
lfm2 lfm2_moe ministral modernbert-decoder nemotron_h olmo3 olmo_hybrid qwen3_5_moe_text
qwen3_5_text qwen3_next
"""
"""Served with the sliding and linear layers left to Transformers."""

REASONS = {
    "bloom": "does not use Transformers' attention interface",
    "deepseek_v2": "multi-head latent attention",
    "deepseek_v3": "multi-head latent attention",
    "deepseek_v4": "which is not supported",
    "diffllama": "K and V are transformed",
    "doge": "works on the attention mask itself",
    "falcon_h1": "LinearAttentionAndFullAttentionLayer",
    "gemma2": "'softcap'",
    "glm4_moe_lite": "multi-head latent attention",
    "gpt_oss": "'s_aux'",
    "jetmoe": "K and V are transformed",
    "kimi_linear": "multi-head latent attention",
    "llama4_text": "chunked attention",
    "mamba": "no layer has full attention",
    "minimax_m3_vl_text": "which is not supported",
    "mllama": "cross-attention",
    "mpt": "does not use Transformers' attention interface",
    "vaultgemma": "'softcap'",
}

NOT_TESTABLE = {
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "minimax",
    "musicgen",
    "musicgen_melody",
    "xlstm",
}
"""Types of which no tiny model can be tried; a new one here deserves a look."""

pytestmark = pytest.mark.usefixtures("small_slabs")


@pytest.mark.parametrize("model_type", tiny.model_types())
def test_no_model_is_silently_wrong(model_type: str) -> None:
    verdict = survey(model_type)
    assert verdict.status != WRONG, verdict.detail
    assert verdict.status != UNTESTABLE or model_type in NOT_TESTABLE, verdict.detail
    if model_type in EXACTLY.split():
        assert (verdict.status, verdict.native) == (EXACT, 0), verdict.detail
    if model_type in IN_PART.split():
        assert verdict.status == PARTLY, verdict.detail
        assert verdict.offloaded > 0 and verdict.native > 0
    if model_type in REASONS:
        assert verdict.status == REFUSED
        assert REASONS[model_type] in verdict.detail
    assert take_pending() is None, "the next model's forward would fail"


def test_the_lists_name_types_that_exist() -> None:
    named = {*EXACTLY.split(), *IN_PART.split(), *REASONS, *NOT_TESTABLE}
    assert named <= set(tiny.model_types())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next", "gemma3n_text"])
def test_the_survey_notices_what_is_left_out(model_type: str) -> None:
    verdict = survey(model_type, budget=16, index="streaming")
    assert verdict.status == WRONG
    assert "logits differ" in verdict.detail


def test_a_model_without_the_attention_interface_is_refused_at_the_first_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "bypasses_attention", lambda config: False)
    model = tiny.tiny_model(tiny.tiny_config("bloom"), "BloomForCausalLM", "oasis")
    cache = OasisCache(model, budget=256)
    with pytest.raises(OasisUnsupportedError):
        model(torch.ones(1, 40, dtype=torch.long), **{compat.cache_kwarg(model): cache})
    assert survey("llama").status == EXACT


def test_attention_that_never_ran_is_noticed_in_the_only_layer_too() -> None:
    model = tiny.tiny_model(
        tiny.tiny_config("llama", num_hidden_layers=1), "LlamaForCausalLM", "oasis"
    )
    cache = OasisCache(model, budget=256)
    model.set_attn_implementation("sdpa")
    with pytest.raises(OasisUnsupportedError, match="was not called"):
        model(torch.ones(1, 40, dtype=torch.long), **{compat.cache_kwarg(model): cache})
    assert take_pending() is None


def test_a_forward_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.tiny_model(tiny.tiny_config("llama"), "LlamaForCausalLM", "oasis")
    cache = OasisCache(model, budget=256)
    update = OasisCache.update

    def fail(self: OasisCache, *args: object, **kwargs: object) -> None:
        update(self, *args, **kwargs)
        raise MemoryError

    monkeypatch.setattr(OasisCache, "update", fail)
    with pytest.raises(MemoryError):
        model(torch.ones(1, 40, dtype=torch.long), **{compat.cache_kwarg(model): cache})
    assert take_pending() is None


def test_the_command_prints_a_table_or_json() -> None:
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    table = runner.invoke(app, ["models", "--filter", "smollm3"])
    assert table.exit_code == 0, table.output
    assert "1 exact" in table.output
    report = runner.invoke(app, ["models", "--filter", "SmolLM3", "--json"])
    assert report.exit_code == 0, report.output
    read = json.loads(report.stdout)
    assert read["counts"] == {"exact": 1}
    assert [row["model_type"] for row in read["models"]] == ["smollm3"]


def test_the_command_says_when_nothing_matches() -> None:
    result = CliRunner().invoke(app, ["models", "--filter", "no such model"])
    assert result.exit_code == 2
    assert "no such model" in result.output
