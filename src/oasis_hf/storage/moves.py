"""Changes of what a layer holds, outside of decode steps: prompts, and tokens taken back."""

import torch
from torch import Tensor

from ..geometry import ceil_div
from .history import span
from .parts import LayerParts


def extend(parts: LayerParts, key: Tensor, value: Tensor, valid: Tensor | None, keep: int) -> None:
    """Store many tokens at once: full groups to the store and index, the rest to the tail.

    Args:
        parts: of the layer.
        key: `[B, H, T, Dk]`.
        value: `[B, H, T, Dv]`.
        valid: `[B, T]` bool, False for padding; None if all are real.
        keep: newest tokens that stay in the tail.
    """
    frontier = parts.frontier
    runs, lengths, committed = _runs(parts), *map(list, frontier.settled())
    frontier.unsettle()
    fresh: list[tuple[slice, Tensor]] = []
    for rows, done, length in runs:
        for part in [rows] if valid is None else _single(rows):
            k, v = key[part], value[part]
            if valid is not None:
                real = valid[part.start]
                k, v = k[:, :, real], v[:, :, real]
            moved = _extend_rows(parts, part, done, length, k, v, keep)
            if not length:
                fresh.append((part, k[:, :, :moved]))
            for row in range(part.start, part.stop):
                lengths[row] += k.shape[2]
                committed[row] += moved
    frontier.filled(lengths, committed)
    parts.cold = True
    if parts.unlearned_after(0):
        rows = sum(part.stop - part.start for part, _ in fresh)
        learn(parts, fresh if rows == parts.batch_size else None)


def learn(parts: LayerParts, keys: list[tuple[slice, Tensor]] | None = None) -> None:
    """Fit an index that learns to what left the tail, and index it; waits for the device.

    A sequence that is short of the budget, next to longer ones, has the basis of the longest.

    Args:
        parts: of the layer.
        keys: what left the tail `[B', H, n, D]`, of every sequence; None: it is read back.
    """
    index, group = parts.index, parts.geometry.group
    if keys is None:
        committed = parts.frontier.settled()[1]
        keys = [
            (slice(row, row + 1), span(parts, row, 0, done)[0])
            for row, done in enumerate(committed)
        ]
    _, longest = max(keys, key=lambda pair: pair[1].shape[2])
    if not longest.shape[2]:
        return
    enough = min(longest.shape[2], parts.wanted * parts.geometry.block)
    for rows, held in keys:
        index.fit(rows, held if held.shape[2] >= enough else longest[:1])
        index.write_range(rows, 0, held.unflatten(2, (-1, group)))
    index.fitted(parts.frontier.columns)
    parts.renew()


def _runs(parts: LayerParts) -> list[tuple[slice, int, int]]:
    """Sequences that can be handled together: (rows, committed, length)."""
    lengths, committed = parts.frontier.settled()
    if len(set(lengths)) == 1 and len(set(committed)) == 1:
        return [(slice(0, parts.batch_size), committed[0], lengths[0])]
    return [
        (slice(row, row + 1), done, length)
        for row, (done, length) in enumerate(zip(committed, lengths, strict=True))
    ]


def _single(rows: slice) -> list[slice]:
    return [slice(row, row + 1) for row in range(rows.start, rows.stop)]


def _extend_rows(
    parts: LayerParts, rows: slice, committed: int, length: int, k: Tensor, v: Tensor, keep: int
) -> int:
    """Returns how many tokens left the tail or never entered it."""
    g, tail, device = parts.geometry, parts.tail, parts.device
    place = torch.arange(committed, length, device=device) % tail.places
    k = torch.cat([tail.k[rows][:, :, place], k], 2)
    v = torch.cat([tail.v[rows][:, :, place], v], 2)
    total = k.shape[2]
    moved = max(0, total - keep) // g.group * g.group
    if moved:
        # What a borrowed store holds already is not written again.
        held = min(max(0, parts.borrowed - committed), moved) // g.block * g.block
        if held < moved:
            blocks = (t[:, :, held:moved].unflatten(2, (-1, g.block)) for t in (k, v))
            parts.store.write_range(rows, (committed + held) // g.block, *blocks)
        if parts.index.ready:
            groups = k[:, :, :moved].unflatten(2, (-1, g.group))
            parts.index.write_range(rows, committed // g.group, groups)
        # From here on the ring may lose what is in the store.
        parts.frontier.committed[rows] = committed + moved
    place = torch.arange(committed + moved, committed + total, device=device) % tail.places
    tail.k[rows, :, place] = k[:, :, moved:]
    tail.v[rows, :, place] = v[:, :, moved:]
    parts.frontier.lengths[rows] = committed + total
    return moved


def drop(parts: LayerParts, columns: int, tokens: int | Tensor) -> None:
    """Take back the newest columns, `tokens` (or `[B]`) real ones; see `Frontier.crop`."""
    _follow(parts, parts.frontier.crop(columns, tokens))


def commit(parts: LayerParts, rows: int, tokens: Tensor, columns: int) -> None:
    """End a verification, of which each sequence keeps some rows; see `Frontier.commit`."""
    _follow(parts, parts.frontier.commit(rows, tokens, columns))


def _follow(parts: LayerParts, left: bool) -> None:
    """Bring the parts to where the frontier went back; `left`: perhaps out of the store."""
    if left:
        reopen(parts)
    elif parts.frontier.in_turn:
        parts.frontier.uncommit(parts.rules.recent, parts.rules.group)
        parts.residency.limit(parts.frontier.committed // parts.rules.block)


def reopen(parts: LayerParts) -> None:
    """Bring the last group back into the tail where tokens that had left it were removed."""
    g, frontier, tail = parts.geometry, parts.frontier, parts.tail
    parts.join()
    pairs = list(zip(*frontier.settled(), strict=True))
    frontier.unsettle()
    for row, (length, committed) in enumerate(pairs):
        if length >= committed:
            continue
        start = length // g.group * g.group
        rows = slice(row, row + 1)
        if length > start:
            k, v = parts.store.read_range(rows, start // g.block, ceil_div(length, g.block))
            place = torch.arange(start, length, device=parts.device) % tail.places
            for ring, part in ((tail.k, k), (tail.v, v)):
                tokens = part.flatten(2, 3)[:, :, : length - start].to(parts.device)
                ring[rows, :, place] = tokens
        frontier.committed[row] = start
    parts.residency.limit(frontier.committed // g.block)


def cut(parts: LayerParts, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Take the newest tokens of each sequence out of every part.

    Args:
        parts: of the layer.
        lengths: tokens that each sequence keeps.

    Returns:
        For each sequence what was taken: k `[1, H, n, Dk]` and v, in host memory.
    """
    parts.join()
    frontier = parts.frontier
    held = frontier.settled()[0]
    taken = [span(parts, row, keep, held[row]) for row, keep in enumerate(lengths)]
    if lengths != held:
        frontier.lengths.copy_(torch.tensor(lengths, device="cpu"))
        frontier.unsettle()
        frontier.fresh, frontier.in_turn = 0, False
        reopen(parts)
    return [(k.cpu(), v.cpu()) for k, v in taken]


def give(parts: LayerParts, states: list[tuple[Tensor, Tensor]], keep: int) -> None:
    """Append tokens to each sequence: k `[1, H, n, Dk]` and v, n of its own; `keep` as above."""
    parts.join()
    frontier = parts.frontier
    lengths, committed = map(list, frontier.settled())
    frontier.unsettle()
    for row, (k, v) in enumerate(states):
        if k.shape[2]:
            rows, (k, v) = slice(row, row + 1), (x.to(parts.device) for x in (k, v))
            _extend_rows(parts, rows, committed[row], lengths[row], k, v, keep)
    frontier.fresh, parts.cold = 0, True


def roll_back(parts: LayerParts, columns: int, lengths: Tensor | None) -> None:
    """Return to the first columns, whatever a forward that broke off has left.

    Args:
        parts: of the layer.
        columns: columns to keep.
        lengths: `[B]` real tokens among them, or None if all are real.
    """
    parts.join()
    parts.frontier.roll_back(columns, lengths)
    parts.cold = True
    reopen(parts)
    # A slot may have been given to a block that never arrived.
    parts.residency.clear()
