"""Where the weights of a model are, and where it computes: not the same under accelerate.

`device_map` may keep weights in host memory or on disk. The model's parameters are then on the
"meta" device, and hooks of accelerate bring them to the device of execution for each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """accelerate's hooks on a module."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def stored_weight(model: torch.nn.Module, name: str) -> Tensor | None:
    """The contents of an offloaded parameter or buffer, or None if no hook keeps them.

    Args:
        model: the model.
        name: of the tensor, as in `state_dict`.
    """
    path = name.split(".")
    # A hook serves the tensors of its module, or of all modules within it.
    for depth in range(len(path) - 1, -1, -1):
        module = model.get_submodule(".".join(path[:depth]))
        for hook in _hooks(module):
            weights = getattr(hook, "weights_map", None)
            key = ".".join(path[depth:])
            if isinstance(weights, Mapping):
                try:
                    return weights[key]
                except KeyError:
                    continue
    return None


def _execution_device(module: torch.nn.Module) -> torch.device | None:
    """Where a module computes; None if nothing says so."""
    for part in module.modules():
        for hook in _hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None and torch.device(device).type != "meta":
                return torch.device(device)
    return next((x.device for x in module.parameters() if x.device.type != "meta"), None)


def layer_devices(model: torch.nn.Module, layers: int) -> list[torch.device]:
    """The device on which each layer's K and V come out.

    Args:
        model: the model.
        layers: layers of its cache.
    """
    ask: Any = getattr(model, "get_decoder", None)
    decoder = None if ask is None else ask()
    found: dict[int, torch.device] = {}
    for module in (decoder if isinstance(decoder, torch.nn.Module) else model).modules():
        number = vars(module).get("layer_idx")
        if isinstance(number, int) and number not in found:
            device = _execution_device(module)
            if device is not None:
                found[number] = device
    fallback = _execution_device(model) or torch.device("cpu")
    return [found.get(number, fallback) for number in range(layers)]
