"""Where drafts come from: the context itself, or the model's first layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .tree import Tree

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


def right(ids: list[int]) -> Drafter:
    """The next token of a text that is known."""
    return lambda known: ids[len(known) : len(known) + 1]


def early_exit(
    model: Any, cache: Any, ids: list[int], context: int, layers: int, count: int
) -> Drafter:
    """`count` greedy tokens of the model's first layers, as `assistant_early_exit` drafts them.

    All drafts of a known text are made at once, a level of a tree at a time.

    Args:
        model: a causal language model of Transformers.
        cache: a `DynamicCache` that holds the context.
        ids: the context and its continuation.
        context: tokens of the context.
        layers: how many of its layers draft.
        count: drafts after each token.
    """
    tree = Tree(context)
    trunk = tree.extend(ids[context:-1], -1)
    tips = list(trunk)
    drafts: list[list[int]] = [[] for _ in trunk]
    config = model.get_decoder().config
    depth = config.num_hidden_layers
    config.num_hidden_layers = layers
    try:
        for _ in range(count):
            best = tree.forward(model, cache).logits[0].argmax(-1).tolist()
            for place, tip in enumerate(tips):
                drafts[place].append(best[tip])
                tips[place] = tree.add(best[tip], tip)
    finally:
        config.num_hidden_layers = depth
    return lambda known: drafts[len(known) - context - 1]
