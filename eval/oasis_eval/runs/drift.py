"""Long outputs: whether what an arm leaves out adds up over thousands of steps.

Dense attention continues a real text; every arm is led along that chain, one token a step, and
then continues the text for itself. What it attends to is ever more what was generated. The end of
the chain is also gone along from a dense reading of all before it: what differs there already comes
of the choices at that length, the rest has added up. Another rounding of dense attention, led and
let go in the same way, says how far harmless differences go.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from oasis_hf import OasisCache
from oasis_hf.facts.compat import cache_kwarg

from ..arms import DENSE, Arm
from ..config import EvalConfig
from ..records import Record
from ..tasks.parts import Sample
from ..tasks.prompt import plain
from .session import Session, attended, counts, feed
from .stops import ends

WINDOWS = 8
"""Equal parts of an output, over which everything is averaged."""
TOP_P = 0.95
"""Greedy outputs of small models soon repeat themselves, where attention has little to decide. So
the chain is sampled, at temperature 1, from the most likely tokens that hold so much."""
GRAM = 4
"""Tokens of what may be repeated."""


def drifted(
    model: Any, tokenizer: Any, samples: list[Sample], arms: list[Arm], config: EvalConfig
) -> Iterator[tuple[Arm, list[Record]]]:
    """Each arm beside dense attention along dense attention's own long outputs.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        samples: texts of one length; their last tokens give way to what is generated.
        arms: what is compared.
        config: the run's.
    """
    texts = [plain(tokenizer, sample["text"]) for sample in samples]
    steps = config.limit(samples[0]["task"], samples[0]["answer_tokens"])
    prompts = [ids[: len(ids) - steps] for ids in texts]
    first = torch.tensor([ids[-1:] for ids in prompts], device=model.device)
    session = Session(model, [ids[:-1] for ids in prompts])
    draws = torch.stack([_uniform(config.seed, sample["number"], steps) for sample in samples], 1)
    draws, last = draws.to(model.device), sorted(ends(model, tokenizer))
    dense: list[Tensor] = []
    chain = released(session, session.cache(DENSE), first, draws, last, dense)
    late = Late(model, prompts, chain, dense)
    for arm in arms:
        started = time.perf_counter()
        own = session if arm.dtype == "" else _session(model, arm.dtype, prompts)
        shared: Record = {"reading": round(own.seconds / len(samples), 3)}
        if arm == DENSE:
            found, free = compared(dense, dense, chain), chain
        else:
            cache = own.cache(arm)
            found = compared(along(own, cache, first, chain), dense, chain)
            shared |= counts(cache)
            if not arm.dense:
                length = len(prompts[0]) - 1
                shared["attended"] = attended(cache, range(length, length + steps))
            # The led cache is done with: arms share the host memory of what was read.
            del cache
            free = released(own, own.cache(arm), first, draws, last)
        found["free"] = loss_of(session, first, free)
        if arm.dtype == "":
            found |= late.compared(arm)
        shared["seconds"] = round((time.perf_counter() - started) / len(samples), 3)
        yield arm, [_record(found, chain, free, row) | shared for row in range(len(samples))]


class Late:
    """The last window of a chain, behind a dense reading of all before it.

    Args:
        model: the model.
        prompts: `[rows][tokens]`.
        chain: `[rows, steps]` what dense attention continued them by.
        dense: its logits `[rows, vocabulary]` of every step.
    """

    def __init__(
        self, model: Any, prompts: list[list[int]], chain: Tensor, dense: list[Tensor]
    ) -> None:
        self.window = max(1, chain.shape[1] // WINDOWS)
        ids = torch.cat([torch.tensor(prompts, device=chain.device), chain], 1)[:, : -self.window]
        self.session = Session(model, ids[:, :-1].tolist(), exact=True)
        self.first, self.chain = ids[:, -1:], chain[:, -self.window :]
        self.dense = dense[-self.window :]

    def compared(self, arm: Arm) -> dict[str, Tensor]:
        """As `compared`, `[rows, window]` and named "fresh_..."; for dense, how exact that is."""
        steps = along(self.session, self.session.cache(arm), self.first, self.chain)
        found = compared(steps, self.dense, self.chain)
        return {f"fresh_{name}": value for name, value in found.items()}


def _uniform(seed: int, number: int, steps: int) -> Tensor:
    """`[steps]` random numbers of one sample, the same for all arms and in any batch."""
    return torch.rand(steps, generator=torch.Generator().manual_seed(seed * 1_000_003 + number))


def _session(model: Any, dtype: str, prompts: list[list[int]]) -> Session:
    """The prompts read by the same model in another rounding."""
    # Made in that type, not cast to it: frequencies of rotary positions stay as they are.
    copy = AutoModelForCausalLM.from_config(
        model.config, dtype=getattr(torch, dtype), attn_implementation="oasis"
    )
    copy = copy.to(model.device).eval()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return Session(copy, [ids[:-1] for ids in prompts])


def released(
    session: Session,
    cache: Any,
    token: Tensor,
    draws: Tensor,
    banned: list[int],
    kept: list[Tensor] | None = None,
) -> Tensor:
    """An output of a cache's own: tokens `[rows, steps]`.

    Args:
        session: what was read.
        cache: holds all before `token`.
        token: `[rows, 1]`.
        draws: `[steps, rows]` random numbers.
        banned: tokens that would end the output.
        kept: takes the logits `[rows, vocabulary]` of every step.
    """
    ids = []
    for draw in draws:
        logits = feed(session.model, cache, token)
        token = sampled(logits, draw, banned)
        ids.append(token)
        if kept is not None:
            kept.append(logits.clone())
    return torch.cat(ids, 1)


def sampled(logits: Tensor, draw: Tensor, banned: list[int]) -> Tensor:
    """Tokens `[rows, 1]`: where `draw` `[rows]` falls in the nucleus of `[rows, vocabulary]`.

    Equal draws give equal tokens where distributions are alike, so that arms can be paired.
    """
    logits = logits.float().clone()
    logits[:, banned] = float("-inf")
    share, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = share.cumsum(-1) - share
    share = share.masked_fill(before >= TOP_P, 0)
    reached = share.cumsum(-1)
    place = (reached <= draw[:, None].to(reached) * reached[:, -1:]).sum(-1, keepdim=True)
    return order.gather(-1, place.clamp(max=order.shape[-1] - 1))


def along(session: Session, cache: Any, first: Tensor, chain: Tensor) -> Iterator[Tensor]:
    """Yield the logits `[rows, vocabulary]` of every step along `chain` `[rows, steps]`.

    Each is a step of its own, as decoding is; dense attention reads a window at once.
    """
    given = torch.cat([first, chain[:, :-1]], 1)
    if isinstance(cache, OasisCache):
        for token in given.split(1, 1):
            yield feed(session.model, cache, token)
    else:
        for part in pieces(session, cache, given):
            yield from part.unbind(1)


def pieces(session: Session, cache: Any, given: Tensor) -> Iterator[Tensor]:
    """Yield the logits `[rows, tokens, vocabulary]` of each window of `given` `[rows, steps]`."""
    passed = {cache_kwarg(session.model): cache}
    for tokens in given.split(-(-given.shape[1] // WINDOWS), 1):
        yield session.model(input_ids=tokens, use_cache=True, **passed).logits


def loss_of(session: Session, first: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy `[rows, steps]` of an output under dense attention."""
    found, done = [], 0
    for part in pieces(session, session.cache(DENSE), torch.cat([first, ids[:, :-1]], 1)):
        targets = ids[:, done : done + part.shape[1]]
        done += part.shape[1]
        logits = part.float().transpose(1, -1)
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(found, 1)


def compared(logits: Iterable[Tensor], dense: list[Tensor], chain: Tensor) -> dict[str, Tensor]:
    """KL in nats, greedy agreement and loss on the chain, each `[rows, steps]`."""
    kl, same, lost = [], [], []
    for own, true, target in zip(logits, dense, chain.T, strict=True):
        p, q = true.float().log_softmax(-1), own.float().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).float())
        lost.append(-q.gather(-1, target[:, None])[:, 0])
    named = {"kl": kl, "agreement": same, "loss": lost}
    return {name: torch.stack(values, 1) for name, values in named.items()}


def _record(found: dict[str, Tensor], chain: Tensor, free: Tensor, row: int) -> Record:
    values = {name: value[row].cpu() for name, value in found.items()}
    own, dense = free[row].tolist(), chain[row].tolist()
    apart = (place for place, (a, b) in enumerate(zip(own, dense, strict=True)) if a != b)
    grams = {tuple(own[n : n + GRAM]) for n in range(len(own) - GRAM + 1)}
    windows: Record = {
        name: round(value.mean().item(), 6)
        if name.startswith("fresh_")
        else [round(part.mean().item(), 6) for part in value.tensor_split(WINDOWS)]
        for name, value in values.items()
    }
    parted = torch.nonzero(values["agreement"] == 0)
    return {
        "loss": values["loss"].mean().item(),
        "kl": values["kl"].mean().item(),
        "agreement": values["agreement"].mean().item(),
        "first_divergence": int(parted[0]) if len(parted) else None,
        "drift": windows
        | {
            "steps": len(own),
            "parted": next(apart, None),
            "distinct": len(grams) / max(1, len(own) - GRAM + 1),
        },
    }
