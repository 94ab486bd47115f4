"""A model's uses in any order, next to Transformers' own cache: see `dialogues`.

On a GPU with both engines, with and without graphs, several caches at once, and threads.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from dialogues import Dialogue
from engines import DEVICE, GPU
from helpers import build_model
from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("small_slabs")

SEED = int(os.environ.get("OASIS_SEED", "1"))
"""Any number will do: `OASIS_SEED=7 make gpu-test`."""

ENGINES: dict[str, dict[str, Any]] = {"reference": {"backend": "reference"}}
if GPU:
    ENGINES |= {"eager": {"graphs": False}, "graphs": {}}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)

POLICIES: dict[str, dict[str, Any]] = {
    "keys2bit": {},
    "minmax": {"index": "minmax"},
    "pca": {"index": "pca"},
    "skip": {"on_miss": "skip"},
    "exact": {"verification": "exact"},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return build_model("Llama", {"num_hidden_layers": 2}).to(DEVICE)


@engines
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("seed", range(SEED, SEED + (2 if GPU else 1)))
def test_any_order_of_uses(
    model: PreTrainedModel, engine: dict[str, Any], policy: dict[str, Any], seed: int
) -> None:
    dialogue = Dialogue(model, seed, **engine, **policy)
    for _ in range(40 if GPU else 25):
        dialogue.move()
    for name in ("say", "decode", "repeat", "decode", "select", "decode", "fork", "decode"):
        dialogue.move(name)
    dialogue.finish()
    if GPU and engine == ENGINES["graphs"]:
        assert dialogue.replayed > 0 and dialogue.captured > 1


@pytest.mark.skipif(not GPU, reason="compiled steps are graphs")
def test_compiled_layers_in_any_order(model: PreTrainedModel) -> None:
    """Few sizes of batch, as each is compiled anew."""
    torch._dynamo.reset()
    dialogue = Dialogue(model, SEED, most=2, compile=True)
    for name in ("say", "decode", "decode", "repeat", "decode", "select", "decode", "generate"):
        dialogue.move(name)
    dialogue.finish()
    assert dialogue.replayed > 0


@engines
def test_caches_take_turns_on_one_model(model: PreTrainedModel, engine: dict[str, Any]) -> None:
    """Each use is another cache's than the one before; one dies, and another takes its place."""
    dialogues = [Dialogue(model, SEED + n, **engine) for n in range(3)]
    for number in range(20):
        for dialogue in dialogues:
            dialogue.move()
        if number % 7 == 6:
            dialogues.pop(0).finish()
            dialogues.append(Dialogue(model, SEED + 100 + number, **engine))
    for dialogue in dialogues:
        dialogue.finish()


@engines
def test_threads_with_caches_of_their_own(model: PreTrainedModel, engine: dict[str, Any]) -> None:
    """Several threads use one model, each with its own cache."""
    failed: list[BaseException] = []
    start = threading.Barrier(3)

    def talk(number: int) -> None:
        try:
            dialogue = Dialogue(model, SEED + number, **engine)
            start.wait()
            for _ in range(25 if GPU else 8):
                dialogue.move()
            dialogue.finish()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
