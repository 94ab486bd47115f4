"""Tiny random models, ways to call them, and the one tolerance that tests share."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from oasis_hf import OasisCache
from oasis_hf.integration.attention import oasis_attention, oasis_mask

VOCABULARY = 128
PROMPT = 180
NEW_TOKENS = 24
WINDOW = 40
"""Sliding window of the hybrid model, crossed by prompts and by bursts of drafts."""

FEEDS_AGAIN = Version(transformers.__version__) < Version("5.23")
"""Whether `generate(prefill_chunk_size=...)` feeds a pre-filled cache its own tokens again."""

FULL = {"budget": 256, "recent_tokens": 8, "block_size": 16}
"""Covers prompt and new tokens; the short recent window lets a group leave the tail midway."""

SPARSE: dict[str, Any] = {
    "budget": 64,
    "block_size": 16,
    "sink_tokens": 16,
    "recent_tokens": 16,
    "max_rows": 8,
}
"""Attends to a part of a prompt."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # Wide, so that attention matters and the tokens vary.
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_next": (
        "Qwen3Next",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}
"""Stem of the class names, and what the config needs beyond `SMALL`."""


def build_model(
    stem: str, options: dict[str, Any], attention: str = "oasis", seed: int = 0
) -> PreTrainedModel:
    """A `{stem}ForCausalLM` with random weights that never ends a sequence by itself."""
    config_class = getattr(transformers, f"{stem}TextConfig", None) or getattr(
        transformers, f"{stem}Config"
    )
    config = config_class(**(SMALL | options))
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@functools.cache
def tiny_model(
    kind: str, attention: str = "oasis", seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """One of `MODELS`, built once per process; tests must leave it as it is."""
    stem, options = MODELS[kind]
    if layers is not None:
        options = options | {"num_hidden_layers": layers}
    return build_model(stem, options, attention, seed)


@functools.cache
def draft_model(kind: str, quality: str) -> PreTrainedModel:
    """A draft for `tiny_model(kind)`: always right ("good"), sometimes ("fair"), or never ("bad").

    A hybrid's draft has the same weights and a wide window, so its "good" is only sometimes right:
    Transformers 5.17 itself fails on drafts whose window is crossed (transformers #48280).
    """
    stem, options = MODELS[kind]
    if "sliding_window" in options:
        options = options | {"sliding_window": options["sliding_window"] and 4096}
    model = build_model(stem, options, "sdpa", seed=1 if quality == "bad" else 0)
    if quality == "fair":
        torch.manual_seed(7)
        for parameter in model.parameters():
            parameter.data += 0.012 * torch.randn_like(parameter)
    settings = model.generation_config
    settings.assistant_confidence_threshold = 0.0
    settings.num_assistant_tokens = 4
    settings.num_assistant_tokens_schedule = "constant"
    return model


def prompt(length: int = PROMPT, batch: int = 1, seed: int = 5) -> Tensor:
    """Random token ids `[batch, length]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def left_padded(pads: list[int], length: int = PROMPT, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Ids and mask `[batch, length]` with `pads[i]` padding tokens at the start of row i."""
    ids = prompt(length, len(pads), seed)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count], mask[row, :count] = 0, 0
    return ids, mask


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which this version's `forward` and `generate` take a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def generate(
    model: PreTrainedModel, ids: Tensor, cache: Any = None, tokens: int = NEW_TOKENS, **options: Any
) -> Tensor:
    """The new tokens of `model.generate`, greedy by default; a fixed seed for sampling."""
    if cache is not None:
        options[cache_argument(model)] = cache
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    torch.manual_seed(11)
    return model.generate(ids, max_new_tokens=tokens, **options)[:, ids.shape[1] :]


@torch.no_grad()
def forward(
    model: PreTrainedModel, ids: Tensor, cache: Any, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Logits `[B, T, V]` of one call; positions follow from the mask as `generate` does it."""
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options |= {"attention_mask": mask, "position_ids": positions}
    return model(input_ids=ids, **{cache_argument(model): cache}, **options).logits


def dense_cache(model: PreTrainedModel) -> DynamicCache:
    """Transformers' own cache for this model."""
    return DynamicCache(config=model.config)


def assert_close(got: Tensor, want: Tensor, rounding: float = 64) -> None:
    """Equal up to the order of summation: a few roundings of the largest value in this dtype."""
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    scale = max(1.0, want.abs().max().item())
    bound = rounding * torch.finfo(want.dtype).eps * scale
    worst = (got.to(want.dtype) - want).abs().max().item()
    assert worst <= bound, f"differs by {worst:.2e}, allowed {bound:.2e}"


@torch.no_grad()
def assert_greedy(
    model: PreTrainedModel,
    ids: Tensor,
    new: Tensor,
    mask: Tensor | None = None,
    rounding: float = 256,
) -> None:
    """New tokens `[B, n]` are those of greedy decoding with all tokens seen, up to ties.

    One dense forward over prompt and new tokens tells the logits of each step. Where two of them
    are as near as roundings, either is right.
    """
    whole = torch.cat([ids, new], 1)
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(new)], 1)
    logits = forward(model, whole, dense_cache(model), mask)[:, ids.shape[1] - 1 : -1].float()
    best = logits.amax(-1)
    chosen = logits.gather(-1, new[..., None])[..., 0]
    eps = torch.finfo(model.dtype).eps
    bound = rounding * eps * float(logits.abs().max())
    worst = float((best - chosen).max())
    assert worst <= bound, f"a token is {worst:.2e} below the best, allowed {bound:.2e}"


def row_by_row(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose products are computed one column of tokens at a time.

    Libraries choose another order of summation for another number of rows. Without that, a token's
    numbers do not depend on the tokens that it is fed with, bit for bit.
    """
    linear = torch.nn.functional.linear

    def product(module: torch.nn.Module, x: Tensor) -> Tensor:
        parts = [linear(part, module.weight, module.bias) for part in x.split(1, 1)]
        return torch.cat(parts, 1)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = types.MethodType(product, module)
    return model


class Attention(torch.nn.Module):
    """Stands for a model's attention module: causal, one of several layers."""

    is_causal = True


class Driver:
    """Feeds Q, K and V of our own to every layer of a cache, as the layers of a model would.

    Attributes:
        cache: the cache fed, built for a tiny Llama.
        seen: `[B, columns]` bool so far, which columns held real tokens.
    """

    def __init__(
        self,
        layers: int = 1,
        heads: int = 4,
        model: Any = None,
        kv_heads: int = 2,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        if model is None:
            model = transformers.LlamaConfig(**(SMALL | {"num_hidden_layers": layers}))
            model._attn_implementation = "oasis"
        self.cache = OasisCache(model, **options)
        self.heads, self.kv_heads, self.device = heads, kv_heads, device
        self.seen = torch.zeros(0, 0, dtype=torch.bool)

    @property
    def layer(self) -> Any:
        """The first layer."""
        return self.cache.layers[0]

    def feed(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> list[Tensor]:
        """One forward: query `[B, Hq, T, D]`, key and value `[B, H, T, D]`, mask `[B, T]`.

        Every layer gets the same; returns what each attends to, `[B, Hq, T, Dv]` on the CPU.
        """
        query, key, value = (states.to(self.device) for states in (query, key, value))
        batch, rows = key.shape[0], key.shape[2]
        new = torch.ones(batch, rows, dtype=torch.bool) if mask is None else mask.bool()
        self.seen = torch.cat([self.seen if self.seen.numel() else new[:, :0], new], 1)
        results = []
        for number in range(len(self.cache.layers)):
            length, _ = self.cache.get_mask_sizes(rows, number)
            given = None if mask is None and bool(self.seen.all()) else self.seen.to(self.device)
            causal = oasis_mask(batch, rows, length, attention_mask=given)
            k, v = self.cache.update(key.clone(), value.clone(), number)
            out, _ = oasis_attention(Attention(), query, k, v, causal)
            results.append(out.transpose(1, 2).cpu())
        return results

    def feed_random(
        self, generator: torch.Generator, batch: int, rows: int, mask: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
        """One forward of random tokens: ((query, key, value), outputs of the layers)."""
        qkv = random_qkv(generator, batch, rows, self.heads, self.kv_heads)
        return qkv, self.feed(*qkv, mask)


def random_qkv(
    generator: torch.Generator,
    batch: int,
    rows: int,
    heads: int = 4,
    kv_heads: int = 2,
    k_dim: int = 16,
    v_dim: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query `[B, Hq, T, Dk]`, key `[B, H, T, Dk]` and value `[B, H, T, Dv]`."""
    return (
        2 * torch.randn(batch, heads, rows, k_dim, generator=generator),
        torch.randn(batch, kv_heads, rows, k_dim, generator=generator),
        torch.randn(batch, kv_heads, rows, v_dim, generator=generator),
    )


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last T tokens over all, in float64: `[Hq, T, D]` over `[H, L, D]`."""
    group, rows, total = query.shape[0] // key.shape[0], query.shape[1], key.shape[1]
    k, v = (t.double().repeat_interleave(group, 0) for t in (key, value))
    logits = query.double() @ k.transpose(-1, -2) * query.shape[-1] ** -0.5
    column, row = torch.arange(total), torch.arange(total - rows, total)
    logits = logits.masked_fill(column[None] > row[:, None], float("-inf"))
    return (logits.softmax(-1) @ v).to(query.dtype)


def tensors_of(part: Any, path: str = "", met: set[int] | None = None) -> dict[str, Tensor]:
    """Every tensor that an object of this package holds, by its path; each object once."""
    met = set() if met is None else met
    if isinstance(part, Tensor):
        return {path: part}
    if isinstance(part, dict):
        parts = part.items()
    elif isinstance(part, list | tuple):
        parts = enumerate(part)
    elif type(part).__module__.startswith("oasis_hf") and id(part) not in met:
        met.add(id(part))
        parts = vars(part).items()
    else:
        return {}
    found: dict[str, Tensor] = {}
    for name, value in parts:
        found |= tensors_of(value, f"{path}.{name}".lstrip("."), met)
    return found
