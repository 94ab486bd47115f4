"""Where drafts come from: the context itself, or the model's first layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Drafter = Callable[[list[int]], list[int]]
"""From all committed tokens to drafts of the next ones."""

LONGEST, SHORTEST = 3, 1


def find_match(ids: list[int]) -> int:
    """Position after the latest earlier occurrence of the newest n-gram, longest first; or -1."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        newest = ids[-size:]
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == newest:
                return end
    return -1


def prompt_lookup(count: int) -> Drafter:
    """What followed the newest n-gram where it occurred before, `count` tokens at most."""

    def draft(ids: list[int]) -> list[int]:
        place = find_match(ids)
        return ids[place : place + count] if place >= 0 else []

    return draft


def early_exit(model: Any, cache: Any, layers: int, count: int) -> Drafter:
    """`count` greedy tokens of the model's first layers, as `assistant_early_exit` drafts them.

    Args:
        model: a causal language model of Transformers.
        cache: a `DynamicCache` that holds all committed tokens but the newest.
        layers: how many of its layers draft.
        count: drafts.
    """
    config = model.get_decoder().config

    def draft(ids: list[int]) -> list[int]:
        depth, drafts = config.num_hidden_layers, [ids[-1]]
        config.num_hidden_layers = layers
        try:
            for _ in range(count):
                newest = torch.tensor([drafts[-1:]], device=model.device)
                logits = model(input_ids=newest, past_key_values=cache).logits
                drafts.append(int(logits[0, -1].argmax()))
        finally:
            config.num_hidden_layers = depth
        for layer in cache.layers[:layers]:
            layer.crop(-count)
        return drafts[1:]

    return draft
