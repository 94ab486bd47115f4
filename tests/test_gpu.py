"""What only a GPU can show: graphs, streams, pinned memory, several devices."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import (
    assert_greedy,
    build_model,
    cache_argument,
    dense_cache,
    draft_model,
    generate,
    left_padded,
    prompt,
    row_by_row,
)
from torch import Tensor
from transformers import PreTrainedModel

import oasis_hf
from oasis_hf import OasisCache
from oasis_hf.step.dense import dense_attention
from oasis_hf.storage import link
from oasis_hf.storage.streams import Beside
from oasis_hf.tools import packaged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = {"head_dim": 64, "num_hidden_layers": 3, "hidden_size": 128}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return build_model("Llama", WIDE).to("cuda")


@pytest.fixture(scope="module")
def half() -> PreTrainedModel:
    return build_model("Llama", WIDE).to("cuda", torch.bfloat16)


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to("cuda") for tensor in tensors]


def run(model: PreTrainedModel, ids: Tensor, tokens: int = 60, **options: Any) -> Tensor:
    """New tokens with a fresh cache; graphs must have served most of the steps if they are on."""
    cache = OasisCache(model, **options)
    new = generate(model, ids, cache, tokens)
    if cache.graphs is not None:
        summary = cache.graphs.summary()
        assert summary["replayed"] > 0, summary
        assert bool(summary["fused"]) == bool(options.get("compile"))
    return new


# ---- graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"block_size": 16}, {"index": "minmax"}, {"on_miss": "skip"}, {"on_miss": 0.01}],
)
@pytest.mark.usefixtures("small_slabs")
def test_graphs_replay_what_eager_steps_do(model: PreTrainedModel, options: dict) -> None:
    """Across blocks, slabs and captures; twice, with other prompts, on one model."""
    for seed, length in ((1, 500), (2, 713)):
        ids = prompt(length, 2, seed).to("cuda")
        eager = run(model, ids, 150, budget=128, graphs=False, **options)
        assert torch.equal(run(model, ids, 150, budget=128, **options), eager)


def test_the_link_decides_what_is_fetched_behind_a_step(model: PreTrainedModel) -> None:
    """Measured once, on the grid; the same for a fresh cache, and what a graph has baked in."""
    ids = prompt(700, 2).to("cuda")
    seen = []
    for graphs in (False, True):
        cache = OasisCache(model, budget=512, on_miss="skip", graphs=graphs)
        tokens = generate(model, ids, cache, 40)
        stats = cache.stats()
        assert stats.link_rate == link.on_grid(stats.link_rate) > 1e9
        assert stats.step_floor is not None and 0 < stats.step_floor < 1e-3
        assert 1 <= stats.cap_blocks <= 32
        seen.append((tokens.tolist(), stats.link_rate, stats.step_floor, stats.cap_blocks))
    assert seen[0] == seen[1]
    assert 1e11 < link.memory_rate(ids.device) < 2e13


def test_without_lookahead_nothing_crosses_the_link(model: PreTrainedModel) -> None:
    for graphs in (False, True):
        cache = OasisCache(model, budget=128, on_miss="skip", fetch_cap=0.0, graphs=graphs)
        generate(model, prompt(700, 2).to("cuda"), cache, 40)
        stats = cache.stats()
        assert stats.bytes_fetched == stats.bytes_filled > 0 and stats.refused > 0


def test_drafts_are_verified_by_graphs(model: PreTrainedModel) -> None:
    """At full budget assisted decoding gives greedy tokens, through captured verifications."""
    ids = prompt(400).to("cuda")
    cache = OasisCache(model, budget=2048)
    draft = draft_model("llama", "bad").to("cuda")
    new = generate(model, ids, cache, 60, assistant_model=draft)
    assert_greedy(model, ids, new)
    assert cache.graphs is not None and cache.graphs.summary()["replayed"] > 0


@pytest.mark.parametrize("quality", ["bad", "good"])
def test_drafts_of_a_batch_are_verified_by_graphs(model: PreTrainedModel, quality: str) -> None:
    """Rows keep different numbers of drafts, and one graph serves all rounds."""
    ids, mask = on_gpu(*left_padded([0, 37, 130], 400))
    cache = OasisCache(model, budget=2048)
    draft = model if quality == "good" else draft_model("llama", "bad").to("cuda")
    options = {"attention_mask": mask, "draft": draft, "num_assistant_tokens": 4}
    options["custom_generate"] = oasis_hf.generation.generate
    assert_greedy(model, ids, generate(model, ids, cache, 60, **options), mask)
    assert cache.graphs is not None
    summary = cache.graphs.summary()
    assert summary["replayed"] > sum(summary["eager"].values()), summary


def test_exact_verification_by_graphs() -> None:
    """Below full budget too: rows in turn, groups taken back into the tail, all inside graphs.

    Bit for bit, so the model's own products must not depend on the number of rows.
    """
    model = row_by_row(build_model("Llama", WIDE).to("cuda"))
    ids = prompt(400).to("cuda")
    plain = run(model, ids, 100, budget=128)
    draft = draft_model("llama", "bad").to("cuda")
    cache = OasisCache(model, budget=128, verification="exact")
    assert torch.equal(generate(model, ids, cache, 100, assistant_model=draft), plain)
    assert cache.graphs is not None and cache.graphs.summary()["replayed"] > 0


def test_compiled_steps_are_close(model: PreTrainedModel) -> None:
    """compile=True: greedy tokens, through graphs with compiled layers."""
    ids = prompt(500).to("cuda")
    torch._dynamo.reset()
    assert_greedy(model, ids, run(model, ids, 60, budget=2048, compile=True))


# ---- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 256])
def test_pieces_of_a_prompt(model: PreTrainedModel, size: int) -> None:
    """Earlier tokens, read back ahead of their use, are those of the whole prompt."""
    ids, mask = on_gpu(*left_padded([0, 37, 120], 700))
    cache = OasisCache(model, budget=2048, prefill_chunk_size=size)
    assert_greedy(model, ids, generate(model, ids, cache, 30, attention_mask=mask), mask)


def test_pieces_of_a_prompt_in_16_bits(half: PreTrainedModel) -> None:
    """Flash attention over a last part of the rows: logits as close as another order of sums."""
    ids, name = prompt(900, 2).to("cuda"), cache_argument(half)
    with torch.no_grad():
        want = half(input_ids=ids, **{name: dense_cache(half)}).logits[:, -1]
        cache = OasisCache(half, budget=2048, prefill_chunk_size=200)
        got = half(input_ids=ids, logits_to_keep=1, **{name: cache}).logits[:, -1]
    spread = float(want.std())
    assert float((got - want).abs().max()) < 0.1 * spread


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "total", "dim"), [(64, 200, 64), (130, 1000, 128), (1, 77, 96)])
def test_last_rows_of_a_prompt(rows: int, total: int, dim: int, dtype: torch.dtype) -> None:
    """Flash attention in one part or two, against float32 with a mask."""
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(2, 4, rows, dim), (2, 2, total, dim), (2, 2, total, dim)]
    q, k, v = (torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes)
    q = 2 * q
    got = dense_attention(q, k, v, None, dim**-0.5).float()
    want = dense_attention(q.float(), k.float(), v.float(), None, dim**-0.5)
    assert float((got - want).abs().max()) < 8 * torch.finfo(dtype).eps * float(want.abs().max())


# ---- streams and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
def test_random_delays_change_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Transfers that start late, end late, or meet a slow main stream: the same tokens."""
    ids = prompt(700, 2, 8).to("cuda")
    options = {"budget": 128, "on_miss": "skip", "graphs": graphs, "prefill_chunk_size": 128}
    want = run(model, ids, 80, **options)
    generator = torch.Generator().manual_seed(0)
    original = Beside.run

    def sleep() -> None:
        torch.cuda._sleep(int(torch.randint(0, 300_000, (1,), generator=generator)))

    @contextmanager
    def late(self: Beside, *tensors: Tensor) -> Iterator[list[Tensor]]:
        sleep()
        with original(self, *tensors) as used:
            sleep()
            yield used
            sleep()

    monkeypatch.setattr(Beside, "run", late)
    for _ in range(2):
        assert torch.equal(run(model, ids, 80, **options), want)


def test_memory_returns(model: PreTrainedModel) -> None:
    """However often a cache is made and dropped, no host or device memory stays taken."""
    ids, times = prompt(3000, 4).to("cuda"), 6

    def use() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), psutil.Process().memory_info().rss

    def once() -> int:
        cache = OasisCache(model, budget=256)
        generate(model, ids, cache, 30)
        return cache.stats().host_bytes

    for _ in range(2):
        held = once()
    device, host = use()
    for _ in range(times):
        once()
    after_device, after_host = use()
    assert after_device <= device
    assert held > 8e6
    # Of the process, whose allocator keeps a little of anything: a quarter of a cache each time.
    assert after_host - host < 0.25 * held * times, (host, after_host, held)


# ---- other ways to run -------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path.insert(0, "tests")
import torch
from helpers import build_model, generate, prompt
from oasis_hf import OasisCache
model = build_model("Llama", {"head_dim": 64, "num_hidden_layers": 2}).to("cuda")
ids = prompt(400, 2, 1).to("cuda")
for options in ({}, {"index": "minmax", "on_miss": "skip"}):
    for graphs in (False, True) if "graphs" in sys.argv else (False,):
        cache = OasisCache(model, budget=64, prefill_chunk_size=150, graphs=graphs, **options)
        print(generate(model, ids, cache, 24).tolist())
"""

OPERATIONS = """
import sys
sys.path.insert(0, "tests")
from operations import Operations, Player
for seed, options in enumerate(({}, {"index": "minmax", "on_miss": "skip"}, {"block_size": 4})):
    chosen = {"on_miss": "fetch", "recent_tokens": 0, "backend": "triton"} | options
    on = Operations(1 + seed, True, True, device="cuda", **chosen)
    on.prompt(70, "left", 1)
    on.decode(2, "none", 2)
    for change in (lambda: on.repeat(3), lambda: on.select([0]), lambda: on.reset(4)):
        change()
        on.prompt(40, "none", 3)
        on.decode(20, "none", 4)
        on.check()
    player = Player(on, seed, most=(4, 4, 3), prompts=(2, 17, 65))
    for _ in range(12):
        player.move()
    print(player.played)
"""


def script(command: list[str], *arguments: str, text: str = SCRIPT, **environment: str) -> str:
    """What `SCRIPT`, or another text, prints."""
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root / "src"), str(root / "kernels" / "torch-ext"), *sys.path])
    done = subprocess.run(
        [*command, sys.executable, "-c", text, *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_launch_blocking() -> None:
    """Where every launch waits for its end, errors would be named: there are none."""
    lines = script([], "graphs", CUDA_LAUNCH_BLOCKING="1").splitlines()
    assert len(lines) == 4 and lines[0] == lines[1] and lines[2] == lines[3]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("text", [SCRIPT, OPERATIONS], ids=["generate", "operations"])
def test_memcheck(text: str) -> None:
    """No kernel reads or writes out of bounds, allocations unpooled, whatever is done."""
    found = script(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"],
        text=text,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    assert "ERROR SUMMARY: 0 errors" in found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(model: PreTrainedModel, tmp_path: Path) -> None:
    """Layers spread by accelerate: each part on its layer's device, the tokens of one GPU."""
    from transformers import LlamaForCausalLM

    ids = prompt(600, 2).to("cuda")
    want = run(model, ids, 60, budget=128)
    model.save_pretrained(tmp_path)
    places: dict[str, int] = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 1}
    places |= {"model.rotary_emb": 0} | {f"model.layers.{n}": int(n > 0) for n in range(3)}
    spread = LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="oasis", device_map=places, dtype=torch.float32
    )
    spread.generation_config.eos_token_id = None
    cache = OasisCache(spread, budget=128)
    assert torch.equal(generate(spread, ids, cache, 60), want)
    assert [layer.parts.pool.k.device.index for layer in cache.offloaded] == [0, 1, 1]


@pytest.mark.skipif(
    importlib.util.find_spec(packaged.PACKAGE) is None, reason=packaged.INSTALL_COMMAND
)
def test_a_real_model_gives_the_tokens_of_the_cpu() -> None:
    """SmolLM2 in float32 over real text, at full budget: what the CPU finds best, up to ties."""
    torch.backends.cuda.matmul.allow_tf32 = False
    llm, tokenizer = packaged.load(packaged.smollm2(), device_map="cuda", dtype=torch.float32)
    ids = tokenizer(packaged.prose(12_000), return_tensors="pt").input_ids[:, :2010]
    new = generate(llm, ids.to("cuda"), OasisCache(llm, budget=4096), 32).cpu()
    llm, _ = packaged.load(packaged.smollm2(), device_map="cpu", dtype=torch.float32)
    assert_greedy(llm, ids, new, rounding=1024)
