"""A random model and a filled cache whose choice of blocks changes slowly, as real text's does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from ...cache import OasisCache
from ...storage import moves
from .plan import HEAT

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 512,
    },
}
"""Decoder shapes by name; weights are random."""

BIAS = 10.0


def shape_sizes(shape: str) -> dict[str, int]:
    """Sizes of a decoder: a name in `SHAPES`, else those of a Hub id's or a folder's config.

    Raises:
        ValueError: neither, or a config without these sizes.
    """
    if shape in SHAPES:
        return SHAPES[shape]
    expected = f"expected one of {', '.join(SHAPES)}, a Hub id, or a folder with a config.json"
    try:
        config = AutoConfig.from_pretrained(shape).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"shape: got {shape!r}, {expected}") from error
    found: dict[str, Any] = {name: getattr(config, name, None) for name in SHAPES["llama-3.1-8b"]}
    if found["head_dim"] is None and found["hidden_size"] and found["num_attention_heads"]:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    if missing := [name for name, size in found.items() if not isinstance(size, int)]:
        raise ValueError(f"shape: got {shape!r}, whose config lacks {', '.join(missing)}")
    return found


def random_model(shape: str, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """A Llama-class model of such sizes on the GPU, with a query bias (see `heated_keys`)."""
    config = LlamaConfig(
        **shape_sizes(shape),
        max_position_embeddings=1 << 20,
        rope_theta=5e5,
        attention_bias=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    config._attn_implementation = "oasis"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    slow = slow_channels(config.head_dim)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.q_proj.bias.view(-1, config.head_dim)
            bias.zero_()
            bias[:, slow] = BIAS / len(slow) ** 0.5
    return model.eval()


def slow_channels(dim: int) -> Tensor:
    """Channels that the rotary embedding hardly turns over a whole context."""
    half = dim // 2
    last = torch.arange(half - 4, half)
    return torch.cat([last, last + half])


def heated_keys(
    batch: int, heads: int, tokens: int, dim: int, *, like: Tensor, heat: float, block: int = 16
) -> Tensor:
    """Random keys `[batch, heads, tokens, dim]`, of which all queries want some blocks more.

    Queries of a random model are unrelated from token to token, and would want other blocks at each
    step. Real ones are not: most of a choice stays. A heat per block, along channels that a bias of
    all queries shares, emulates that; the turnover that results is measured and reported.

    Args:
        batch: sequences.
        heads: KV heads.
        tokens: of each sequence.
        dim: of the keys.
        like: a tensor of the device and dtype wanted.
        heat: standard deviation of the heats, in logits; the less, the more of a choice changes.
        block: tokens that share a heat.
    """
    keys = torch.randn(batch, heads, tokens, dim, device=like.device, dtype=like.dtype)
    heats = torch.randn(batch, heads, tokens // block + 1, 1, device=like.device) * heat
    slow = slow_channels(dim).to(like.device)
    scale = dim**0.5 / BIAS / len(slow) ** 0.5
    per_token = heats.repeat_interleave(block, 2)[:, :, :tokens]
    keys[..., slow] += (per_token * scale).to(keys.dtype)
    return keys


@torch.no_grad()
def filled_cache(
    model: LlamaForCausalLM, batch: int, tokens: int, heat: float = HEAT, **options: Any
) -> OasisCache:
    """A cache that holds `tokens` random tokens.

    All layers share one layer's contents, and its host memory: what a step reads and moves is that
    of a real cache, what it would take to fill one is not spent.
    """
    cache = OasisCache(model, **options)
    config = model.config
    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
    first = cache.offloaded[0]
    first.store_layers = 1
    keys = heated_keys(*shape, like=model.lm_head.weight, heat=heat)
    lengths = torch.full((batch,), tokens, device=keys.device)
    first.adopt(keys, torch.randn_like(keys), lengths, tokens)
    # The other layers read the same host memory: it must be written by then.
    first.parts.join()
    example = keys[:, :, :1].clone()
    del keys
    if first.parts.unlearned_after(0):
        first.parts.index.observe(torch.randn_like(example)[:, :, None], None)
        moves.learn(first.parts)
    for layer in cache.offloaded[1:]:
        layer.lazy_initialization(example, example)
        layer.parts.store.slabs, layer.parts.store.table = (
            first.parts.store.slabs,
            first.parts.store.table,
        )
        layer.parts.reserve(tokens)
        index, source = layer.parts.index, first.parts.index
        for name, array in (*source.arrays.items(), *source.learned.items()):
            (index.arrays if name in index.arrays else index.learned)[name].copy_(array)
        if source.ready:
            index.fitted(tokens)
        for ours, theirs in (
            (layer.parts.frontier.lengths, first.parts.frontier.lengths),
            (layer.parts.frontier.committed, first.parts.frontier.committed),
            (layer.parts.tail.k, first.parts.tail.k),
            (layer.parts.tail.v, first.parts.tail.v),
        ):
            ours.copy_(theirs)
        layer.parts.renew()
    cache.ledger.append(None, batch, tokens, first.device)
    torch.cuda.empty_cache()
    return cache
