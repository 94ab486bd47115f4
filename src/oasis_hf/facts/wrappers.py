"""Modules that hold a model: adapters, compiled modules, parallel ones, a user's own.

A wrapper's `generate` may call the model inside it, and the wrapper may be called itself; either
way the model's own `__call__` is where the cache passes by. So everything that a cache puts on a
model goes on that one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import takes_cache
from .handle import OasisUnsupportedError

_REPLACES_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of PEFT adapter that hand the model a cache of their own."""


def served_model(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside `module` that is given the cache; `module` itself if there is no other.

    Raises:
        OasisUnsupportedError: `module` holds several models, or an adapter that brings its own
            cache.
    """
    if isinstance(module, PreTrainedModel):
        return module
    _check_adapter(module)
    found = [model for model in _outermost(module) if takes_cache(model)]
    # An encoder of text may take a cache too.
    able = [model for model in found if model.can_generate()] or found
    if len(able) > 1:
        names = ", ".join(type(model).__name__ for model in able)
        raise OasisUnsupportedError(
            f"model: got a {type(module).__name__} that holds several models ({names}), expected "
            "one; pass the model that generates"
        )
    return able[0] if able else module


def _outermost(module: torch.nn.Module) -> list[PreTrainedModel]:
    """The models within a module that are not part of another one."""
    found: dict[int, PreTrainedModel] = {}
    for child in module.children():
        inner = [child] if isinstance(child, PreTrainedModel) else _outermost(child)
        found |= {id(model): model for model in inner}
    return list(found.values())


def _check_adapter(module: torch.nn.Module) -> None:
    kind = getattr(getattr(module, "active_peft_config", None), "peft_type", None)
    name = str(getattr(kind, "value", kind))
    if name in _REPLACES_CACHE:
        raise OasisUnsupportedError(
            f"model: its active adapter is of type {name}, which gives the model a cache of its "
            "own instead of the caller's; use another kind of adapter"
        )


def is_compiled(forward: Any) -> bool:
    """Whether a function is one that `torch.compile` returned."""
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(
        forward, "_torchdynamo_disable"
    )


def adds_tokens(module: Any) -> bool:
    """Whether the active adapter of a module feeds the model tokens of its own (prompt tuning)."""
    return bool(getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False))
