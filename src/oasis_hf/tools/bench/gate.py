"""No speed is reported unless the engines agree."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from ...cache import OasisCache
from ...config import BLOCK, DEFAULT_CAP, FINEST_BLOCK
from ...facts.compat import cache_kwarg

CHECKS: dict[str, dict[str, Any]] = {
    "keys2bit": {"on_miss": "fetch", "block_size": BLOCK},
    "keys2bit-fine": {"on_miss": "fetch", "block_size": FINEST_BLOCK},
    # Engines agree on what they fetch only under the same cap.
    "keys2bit-skip": {"on_miss": "skip", "fetch_cap": DEFAULT_CAP},
    "pca": {"index": "pca", "on_miss": "fetch", "block_size": BLOCK},
    "minmax": {"index": "minmax", "on_miss": "fetch"},
    "minmax8": {"index": "minmax8", "on_miss": "fetch"},
}
"""Options of the `OasisCache` under which eager and graph steps are compared with torch's."""

FUSED: tuple[dict[str, Any], ...] = ({"graphs": False}, {"graphs": True})
COMPILED: tuple[dict[str, Any], ...] = ({"compile": True},)


class GateFailedError(RuntimeError):
    """The engines disagree: no speed is reported."""


def largest_difference(
    model: LlamaForCausalLM, options: dict[str, Any], engines: tuple[dict[str, Any], ...]
) -> float:
    """Compare the first logits of fused engines with those of the torch engine.

    Args:
        model: a small model in float32.
        options: of the `OasisCache`.
        engines: further options, one set per engine compared.

    Raises:
        GateFailedError: they differ by more than rounding.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    ids = torch.randint(1, 500, (2, 1500), device=model.device, generator=generator)
    logits = []
    for extra in ({"backend": "reference"}, *({"backend": "triton"} | e for e in engines)):
        cache = OasisCache(model, budget=256, **options, **extra)
        out = model.generate(
            ids,
            max_new_tokens=12,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **{cache_kwarg(model): cache},
        )
        logits.append(torch.stack(out.logits[:4]))
    worst = max(float((logits[0] - other).abs().max()) for other in logits[1:])
    spread = float(logits[0].std())
    # Written so that NaN fails too.
    if not worst <= 0.02 * spread:
        raise GateFailedError(
            f"{options}: logits differ by {worst:.3g} (spread {spread:.3g}); no speed is reported "
            "before the tests pass: pytest tests/test_triton_engine.py"
        )
    return worst
