"""The weights with which the small retrieval model begins: two heads' work, laid into a Llama.

To find out by gradients that attention can look for what is equal takes a model most of its
training; what it does then is known (induction heads, Olsson et al. 2022). So it is given here:

- layer 0 looks one to five tokens back, by position alone: a constant, turned by so many positions
  in the fast rotary pairs. It writes down which key stands there, and how far back;
- layer 1 looks for the place where the same key stands one token further back, in the rotary pairs
  that hardly turn within the span, and copies the token that it finds.

All of it is added to weights that are drawn as usual, and all of it is trained afterwards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .language import LENGTH, Words

TURN = 0.45
"""Most radians, over the span, of a pair that counts as one that hardly turns."""
NEIGHBOURS, PAIRS = 10.0, 10
"""Logit of one fast pair where the distance is right, of which a next neighbour lacks 0.6 in all,
and how many pairs there are: that no far token has nearly the same angles in all of them."""
KEY, PLACE = 40.0, 16.0
"""Logits of the right key, and of the right place behind it."""
COPY = 6.0
"""What is copied, beside a token's own code of length 1."""


class Room:
    """Who has which dimensions of the residual stream.

    Attributes:
        size: dimensions of one head's code of a key.
        code: a key's own code, one for each KV head; other words have none.
        near: the code of the key one to `LENGTH` tokens back.
        last: the code of the key one more back.
        text: what a token is when it is copied or predicted.
        steps: how far back the key is: here, one token, and so on.
        constant: the same for all tokens.
        other: for tokens that are no keys, so that all are of one length.
    """

    def __init__(self, heads: int, size: int, text: int, hidden: int) -> None:
        self.size = size
        widths = [heads * size] * 3 + [text, LENGTH + 2, 1, 1]
        used = sum(widths)
        if used > hidden:
            raise ValueError(f"hidden_size: got {hidden}, expected at least {used}")
        ends = torch.tensor(widths).cumsum(0).tolist()
        self.code, self.near, self.last, self.text, self.steps, self.constant, self.other = (
            torch.arange(end - width, end) for width, end in zip(widths, ends, strict=True)
        )


def slow_dimensions(frequencies: Tensor, span: int) -> Tensor:
    """Dimensions of a head, from the fastest to the slowest, that hardly turn within `span`."""
    pairs = torch.nonzero(frequencies * span < TURN)[:, 0]
    # Transformers rotates dimension i together with i + D / 2.
    return torch.stack([pairs, pairs + len(frequencies)], -1).flatten()


@torch.no_grad()
def lay(model: Any, words: Words, span: int) -> None:
    """Adds the circuit to the weights of a Llama.

    Args:
        model: two layers or more, tied embeddings; more query heads than `LENGTH` in layer 0.
        words: the vocabulary.
        span: positions over which a key is to be found.

    Raises:
        ValueError: it does not fit into the model.
    """
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads
    if queries <= LENGTH:
        raise ValueError(f"num_attention_heads: got {queries}, expected more than {LENGTH}")
    frequencies = model.model.rotary_emb.inv_freq
    slow = slow_dimensions(frequencies, span)
    room = Room(heads, len(slow) - LENGTH - 1, dim, config.hidden_size)
    embed(model.model.embed_tokens.weight, room, words, heads)
    # After the norm, a part of length 1 of a token's four is so long.
    unit = math.sqrt(config.hidden_size) / 2
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    look_back(first, room, frequencies, unit)
    # Behind a key, two parts were added to the four.
    unit *= math.sqrt(4 / 6)
    look_for(second, room, slow, unit, queries // heads)


def embed(weight: Tensor, room: Room, words: Words, heads: int) -> None:
    """Codes of all words, of keys also as keys: four parts of length 1, or two and a longer one."""
    keys = slice(2, words.first_value)
    draw = torch.randn(words.count, len(room.text))
    weight[:, room.text] += torch.nn.functional.normalize(draw, dim=-1)
    codes = torch.randn(words.keys, heads, room.size)
    codes = torch.nn.functional.normalize(codes, dim=-1) / math.sqrt(heads)
    weight[keys, room.code[0] : room.code[-1] + 1] += codes.flatten(1)
    weight[keys, room.steps[0]] += 1
    weight[:, room.other] += math.sqrt(2)
    weight[keys, room.other] -= math.sqrt(2)
    # The logits of the first layer are large, and neighbours close: the constant has to be the same
    # for all tokens, also behind the norm.
    weight[:, room.constant] = 0
    weight.copy_(math.sqrt(3) * torch.nn.functional.normalize(weight, dim=-1))
    weight[:, room.constant] = 1


def look_back(attention: Any, room: Room, frequencies: Tensor, unit: float) -> None:
    """Query head n looks n + 1 tokens back, and writes down the key that it finds there."""
    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    half = len(frequencies)
    dim = 2 * half
    size = math.sqrt(NEIGHBOURS / attention.scaling) / unit
    pairs = torch.arange(PAIRS)
    code = len(room.code)
    for head in range(k.shape[0] // dim):
        at = head * dim
        k[at + pairs, room.constant] += size
        v[at + torch.arange(code), room.code] += 1 / unit
        v[at + code, room.steps[0]] += 1 / unit
    for number in range(LENGTH + 1):
        at, back = number * dim, number + 1
        angles = -back * frequencies[pairs]
        q[at + pairs, room.constant] += size * angles.cos()
        q[at + half + pairs, room.constant] += size * angles.sin()
        found = room.near if back <= LENGTH else room.last
        o[found, at + torch.arange(code)] += 1
        o[room.steps[back], at + code] += 1


def look_for(attention: Any, room: Room, slow: Tensor, unit: float, group: int) -> None:
    """All query heads look for the place one further behind the same key, and copy its token."""
    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    dim = attention.head_dim
    heads = k.shape[0] // dim
    same = math.sqrt(KEY / attention.scaling) / unit * math.sqrt(heads)
    place = math.sqrt(PLACE / attention.scaling) / unit
    content, where = slow[: room.size], slow[room.size :]
    for head in range(heads):
        at, own = head * dim, slice(head * room.size, (head + 1) * room.size)
        for found in (room.near, room.last):
            k[at + content, found[own]] += same
        k[at + where, room.steps[1:]] += place
        v[at + torch.arange(dim), room.text] += 1 / unit
        for number in range(head * group, (head + 1) * group):
            at = number * dim
            for found in (room.code, room.near):
                q[at + content, found[own]] += same
            q[at + where, room.steps[:-1]] += place
            o[room.text, at + torch.arange(dim)] += COPY / (heads * group)
