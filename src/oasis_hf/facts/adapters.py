"""Adapters in a model: which of them are in effect, as told by the layers that hold them.

PEFT and Transformers' own `model.add_adapter` put the same layers into a model. They are known by
what they say of themselves, so that PEFT need not be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

WRAPPED = ("base_layer", "original_module")
"""Names under which a layer with adapters holds the module that it stands for."""


def _holds_adapters(module: torch.nn.Module) -> bool:
    # Asked of the class: of an instance, a name that is missing is looked for in slow ways.
    return hasattr(type(module), "merged_adapters")


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers that hold adapters, in a fixed order; cheaper than by `model.modules()`."""
    left = [model]
    while left:
        module = left.pop()
        # A layer with adapters has parts; the adapters themselves hold none.
        parts = [x for x in module._modules.values() if x is not None and x._modules]
        if _holds_adapters(module):
            yield module
            parts = [x for x in parts if not isinstance(x, torch.nn.ModuleDict)]
        left.extend(parts)


def _state(module: Any) -> tuple[Any, ...]:
    return (
        type(module).__name__,
        bool(module.disable_adapters),
        tuple(module.active_adapters),
        tuple(module.merged_adapters),
        tuple(_scaling(module).items()),
    )


def _scaling(module: Any) -> dict[str, Any]:
    """The factor of each adapter of a layer, where it has such."""
    found = vars(module).get("scaling")
    if not isinstance(found, dict):
        return {}
    # Comparing tensors would wait for the device.
    return {k: x if isinstance(x, int | float) else id(x) for k, x in found.items()}


def adapter_state(model: torch.nn.Module) -> tuple[Any, ...]:
    """What the adapters of a model are set to, in well under a step's time.

    Compares equal until an adapter is added, removed, chosen, disabled, scaled, merged or unmerged.
    Weights are not looked at. Empty for a model without adapters.
    """
    if "peft" not in sys.modules:
        # Nothing else makes such layers, and a model without them is not to wait for this.
        return ()
    states: list[Any] = [_state(x) for x in _layers(model)]
    prompt = _virtual_tokens(model)
    return tuple(states if prompt is None else [prompt, *states])


def _virtual_tokens(model: Any) -> Any:
    """The adapter in use of a model that puts learned tokens before its prompts."""
    if not hasattr(type(model), "active_peft_config"):
        return None
    config = model.active_peft_config
    return model.active_adapter if getattr(config, "is_prompt_learning", False) else None


def in_effect(module: Any) -> list[str]:
    """Adapters whose own weights a layer computes with: those that are merged are in its base's."""
    if module.disable_adapters or module.merged_adapters:
        return []
    return list(module.active_adapters)


class Adapters:
    """The adapters of one model, by the names of its tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = {name: x for name, x in model.named_modules() if _holds_adapters(x)}
        self._prompt = _virtual_tokens(model)

    def plain_name(self, name: str) -> str | None:
        """A tensor's name in the model without wrappers; None if it belongs to an idle adapter."""
        path = name.split(".")
        for depth in range(len(path) - 1):
            module = self._layers.get(".".join(path[:depth]))
            if module is None or path[depth] in WRAPPED:
                continue
            part = getattr(module, path[depth], None)
            by_name = hasattr(part, "keys") and depth + 1 < len(path)
            if by_name and path[depth + 1] not in in_effect(module):
                return None
        plain = ".".join(part for part in path if part not in (*WRAPPED, "_orig_mod"))
        return plain.removeprefix("base_model.model.")

    def summary(self) -> list[str]:
        """What is in effect: a line for each layer that computes with adapters."""
        lines = [] if self._prompt is None else [f"prompt {self._prompt}"]
        for name, module in self._layers.items():
            names = in_effect(module)
            scaling = vars(module).get("scaling")
            factors = scaling if isinstance(scaling, dict) else {}
            known: dict[str, Any] = {
                one: float(factors.get(one, 1)) for one in names if _has(module, one)
            }
            if module.disable_adapters and module.merged_adapters:
                # They are taken out of the weights by the next forward.
                known["merged and disabled"] = sorted(module.merged_adapters)
            if known:
                kind = type(module).__name__
                lines.append(f"{self.plain_name(name)} {kind} {sorted(known.items())}")
        return sorted(lines)

    def names(self) -> list[str]:
        """Adapters in effect anywhere in the model."""
        found = {one for x in self._layers.values() for one in in_effect(x) if _has(x, one)}
        return sorted(found | ({str(self._prompt)} if self._prompt is not None else set()))


def _has(module: Any, adapter: str) -> bool:
    """Whether a layer has weights of an adapter: one may be active that is for other layers."""
    parts = (getattr(module, name, ()) for name in (*module.adapter_layer_names, "modules_to_save"))
    return any(hasattr(part, "keys") and adapter in part for part in parts)
