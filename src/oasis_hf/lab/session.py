"""Records the generations that the lab compares, of one text and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from ..cache import OasisCache
from .drafts import Drafter, early_exit, prompt_lookup
from .record import generate, read
from .recording import Recording, Run
from .texts import text_ids

RUNS = ("right", "exit-probe", "lookup", "exit", "sparse")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is recorded.

    Attributes:
        text: one of `oasis_hf.lab.texts.TEXTS`.
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
    progress: Callable[[str], None] = lambda text: None,
) -> Recording:
    """Read a text densely, then decode its continuation once for each kind of run.

    - right: one token a step, and a probe row that is the right next token.
    - exit-probe: one token a step, and a probe row drafted by the first layers.
    - lookup: verifications of what the context says after the newest n-gram.
    - exit: verifications of drafts of the first layers.
    - sparse: as "right", but all rows attend to the working set of an `OasisCache`.

    Raises:
        ValueError: an unknown run.
    """
    unknown = sorted(set(runs) - set(RUNS))
    if unknown:
        raise ValueError(f"runs: got {', '.join(unknown)}, expected some of {', '.join(RUNS)}")
    ids, context = text_ids(setup.text, tokenizer, setup.context, setup.following, setup.seed)
    progress(f"{setup.text}: reading {context:,} tokens")
    sparse = OasisCache(model, budget=setup.sparse_budget)
    sparse.activate_past_recording()
    keys, scaling = read(model, ids[:context], sparse)
    base = DynamicCache(config=model.config)
    for number, layer in enumerate(sparse.offloaded):
        base.update(*layer.history([context])[:2], number)
    if setup.greedy:
        ids = _greedy(model, base, ids[: context + 1], setup.following - 1)
    found: dict[str, Run] = {}
    for name in runs:
        progress(f"{setup.text}: decoding {len(ids) - context} tokens, {name}")
        cache = sparse if name == "sparse" else base
        draft, probe = _drafters(name, model, cache, ids, setup)
        found[name] = generate(model, ids, context, cache, draft, probe)
        if cache is base:
            base.crop(context - base.get_seq_length())
    about = dataclasses.asdict(setup) | {
        "text": setup.name,
        "model": Path(str(model.config._name_or_path)).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Recording(keys, scaling, about, found)


@torch.inference_mode()
def _greedy(model: Any, cache: Any, ids: list[int], count: int) -> list[int]:
    """The ids, all but the last of which `cache` holds, and `count` greedy ones; not kept there."""
    context = cache.get_seq_length()
    for _ in range(count):
        newest = torch.tensor([ids[-1:]], device=model.device)
        ids = [*ids, int(model(input_ids=newest, past_key_values=cache).logits[0, -1].argmax())]
    cache.crop(context - cache.get_seq_length())
    return ids


def _drafters(
    name: str, model: Any, cache: Any, ids: list[int], setup: Setup
) -> tuple[Drafter | None, Drafter | None]:
    """What is verified, and what only looks ahead."""

    def right(known: list[int]) -> list[int]:
        return ids[len(known) : len(known) + 1]

    match name:
        case "lookup":
            return prompt_lookup(setup.drafts), None
        case "exit":
            return early_exit(model, cache, setup.exit_layers, setup.drafts), None
        case "exit-probe":
            return None, early_exit(model, cache, setup.exit_layers, 1)
        case _:
            return None, right
