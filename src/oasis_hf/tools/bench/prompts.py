"""Time to the first token of a long prompt, read for real through `generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

from ...cache import OasisCache
from ...facts.compat import cache_kwarg
from .memory import release

OASIS_CHUNK = 8192
DENSE_CHUNK = 16384
"""Tokens per piece of a dense prompt that does not fit the device at once."""


def first_tokens(model: LlamaForCausalLM, tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of one prompt: Oasis twice, as its first run takes host memory; then DynamicCache.

    A dense prompt is read at once, and in pieces if that does not fit.
    """
    for run in ("first", "again"):
        options = {"prefill_chunk_size": OASIS_CHUNK}
        yield {"prompt": "oasis", "run": run} | _attempt(model, tokens, options, {})
    row = _attempt(model, tokens, None, {})
    if row.get("error", "").startswith(torch.OutOfMemoryError.__name__):
        row = _attempt(model, tokens, None, {"prefill_chunk_size": DENSE_CHUNK})
    yield {"prompt": "dense", "run": "first"} | row


def _attempt(
    model: LlamaForCausalLM, tokens: int, oasis: dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """One row, with what went wrong instead of figures if anything does."""
    size = (oasis or options).get("prefill_chunk_size")
    row = {"tokens": tokens, "prefill_chunk_size": size}
    try:
        return row | _first_token(model, tokens, oasis, options)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def _first_token(
    model: LlamaForCausalLM, tokens: int, oasis: dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Seconds to the first token, and the peak of HBM.

    Args:
        model: on the device.
        tokens: length of the prompt.
        oasis: options of an `OasisCache`, or None for a `DynamicCache`.
        options: of `generate`.
    """
    ids = torch.randint(1, model.config.vocab_size, (1, tokens), device="cuda")
    release()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    cache: Any = DynamicCache(config=model.config) if oasis is None else OasisCache(model, **oasis)
    options = options | {cache_kwarg(model): cache}
    model.generate(ids, max_new_tokens=1, do_sample=False, **options)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_hbm_bytes": torch.cuda.max_memory_allocated()}
