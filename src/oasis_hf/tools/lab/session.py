"""Records the generations that the lab compares, of one text and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from ...cache import OasisCache
from ...config import BLOCK
from .drafts import Drafter, early_exit, prompt_lookup, right
from .record import generate, generate_at_once, read, rounds_of
from .recording import Recording, Run
from .texts import text_ids

SPARSE_ROUNDS = 40
"""Most rounds of the run "sparse", which alone cannot be fed at once."""
RUNS = ("right", "exit-probe", "lookup", "exit", "sparse")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is recorded.

    Attributes:
        text: one of `oasis_hf.tools.lab.texts.TEXTS`.
        context: tokens that are read densely.
        following: tokens that are decoded.
        drafts: drafts of one verification at most.
        exit_layers: layers of an early exit.
        sparse_budget: budget of the cache of the run "sparse".
        greedy: decode what the model says instead of what the text does.
        seed: of the needles.
    """

    text: str
    context: int = 6144
    following: int = 128
    drafts: int = 5
    exit_layers: int = 28
    sparse_budget: int = 512
    greedy: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """The text, and how it goes on."""
        return f"{self.text}, greedy" if self.greedy else self.text


def record(
    model: Any,
    tokenizer: Any,
    setup: Setup,
    runs: tuple[str, ...] = RUNS,
    earlier: Recording | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Recording]:
    """Read a text densely, then decode its continuation once for each kind of run.

    - right: one token a step, and a probe row that is the right next token.
    - exit-probe: one token a step, and a probe row drafted by the first layers.
    - lookup: verifications of what the context says after the newest n-gram.
    - exit: verifications of drafts of the first layers.
    - sparse: as "right", but all rows attend to the working set of an `OasisCache`.

    Args:
        model: a causal language model with attention "oasis".
        tokenizer: its tokenizer.
        setup: what is recorded.
        runs: which of `RUNS`.
        earlier: a recording of the same setup, of which the context and runs are kept.
        progress: is told what comes next.

    Yields:
        The recording so far: after reading, and after each run.

    Raises:
        ValueError: an unknown run, or more layers for an early exit than the model has.
    """
    unknown = sorted(set(runs) - set(RUNS))
    if unknown:
        raise ValueError(f"runs: got {', '.join(unknown)}, expected some of {', '.join(RUNS)}")
    depth = model.get_decoder().config.num_hidden_layers
    if not 1 <= setup.exit_layers <= depth:
        raise ValueError(
            f"exit_layers: got {setup.exit_layers}, expected 1 to {depth}, the model's layers"
        )
    ids, context = text_ids(setup.text, tokenizer, setup.context, setup.following, setup.seed)
    cache = DynamicCache(config=model.config)
    if earlier is None:
        progress(f"{setup.name}: reading {context:,} tokens")
        keys, scaling = read(model, ids[:context], cache)
        values = torch.stack([layer.values[0] for layer in cache.layers])
        earlier = Recording(keys, values, scaling, about(model, setup))
        yield earlier
    else:
        for number, (key, value) in enumerate(zip(earlier.keys, earlier.values, strict=True)):
            cache.update(key[None], value[None], number)
    if setup.greedy:
        ids = _greedy(model, cache, ids[: context + 1], setup.following - 1)
    found = dict(earlier.runs)
    for name in runs:
        if name not in found:
            progress(f"{setup.name}: decoding {len(ids) - context} tokens, {name}")
            found[name] = _decode(name, model, cache, ids, context, setup)
            yield dataclasses.replace(earlier, runs=found)


def about(model: Any, setup: Setup) -> dict[str, Any]:
    """Where and with what a recording is made."""
    return dataclasses.asdict(setup) | {
        "text": setup.name,
        "model": Path(str(model.config._name_or_path)).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@torch.inference_mode()
def _decode(name: str, model: Any, cache: Any, ids: list[int], context: int, setup: Setup) -> Run:
    """One run, from a `DynamicCache` of the context."""

    def first_layers(count: int) -> Drafter:
        return early_exit(model, cache, ids, context, setup.exit_layers, count)

    match name:
        case "lookup":
            rounds = rounds_of(ids, context, prompt_lookup(setup.drafts))
        case "exit":
            rounds = rounds_of(ids, context, first_layers(setup.drafts))
        case "exit-probe":
            rounds = rounds_of(ids, context, probe=first_layers(1))
        case _:
            rounds = rounds_of(ids, context, probe=right(ids))
    if name != "sparse":
        return generate_at_once(model, ids, context, rounds, cache)
    sparse = OasisCache(model, budget=setup.sparse_budget, block_size=BLOCK)
    adopt(sparse, cache)
    return generate(model, ids, islice(rounds, SPARSE_ROUNDS), sparse)


def adopt(sparse: OasisCache, dense: Any) -> None:
    """Fill an empty `OasisCache` with what a dense one holds, as a prompt before drafts."""
    sparse.expect_drafts()
    for layer, held in zip(sparse.offloaded, dense.layers, strict=True):
        length = held.keys.shape[2]
        layer.adopt(held.keys, held.values, torch.tensor([length]), length)
    sparse.ledger.append(None, 1, length, held.keys.device)


@torch.inference_mode()
def _greedy(model: Any, cache: Any, ids: list[int], count: int) -> list[int]:
    """The ids, all but the last of which `cache` holds, and `count` greedy ones; not kept there."""
    context = cache.get_seq_length()
    for _ in range(count):
        newest = torch.tensor([ids[-1:]], device=model.device)
        ids = [*ids, int(model(input_ids=newest, past_key_values=cache).logits[0, -1].argmax())]
    cache.crop(context - cache.get_seq_length())
    return ids
