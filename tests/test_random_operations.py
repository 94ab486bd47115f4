"""Any order of cache operations on both engines, drawn by a seed: see `operations`.

On a GPU all of it; without one the Triton engine plays a little in the interpreter, where every
address is looked up.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from engines import DEVICE, GPU
from memcheck import memcheck
from operations import MAX_ROWS, WEIGHTS, Operations, Player

pytestmark = pytest.mark.usefixtures("small_slabs")

SEED = int(os.environ.get("OASIS_SEED", "1"))
"""Any number will do: `OASIS_SEED=7 make gpu-test`."""

KINDS: dict[str, dict[str, Any]] = {
    "keys2bit": {"full": True, "padded": True},
    "minmax": {"full": True, "padded": True, "index": "minmax"},
    "skip": {"full": False, "padded": True, "on_miss": "skip", "head_room": 1},
    "exact": {"full": True, "padded": False, "verification": "exact", "recent_tokens": 8},
    "block 4": {"full": False, "padded": True, "block_size": 4, "index": "minmax8"},
    "pca": {"full": False, "padded": True, "index": "pca"},
    "no kernel": {"full": True, "padded": True, "index": "mean"},
}

SMALL = {"most": (3, 1, 2), "prompts": (2, 17, 70)}
"""What the interpreter can do in a second or two."""


def operations(backend: str, kind: str, batch: int = 2, kv_heads: int = 2) -> Operations:
    """A layer of one kind."""
    if backend == "triton":
        pytest.importorskip("triton")
    options = {"recent_tokens": 0, "on_miss": "fetch"} | KINDS[kind]
    return Operations(batch, kv_heads=kv_heads, device=DEVICE, backend=backend, **options)


@pytest.mark.skipif(GPU, reason="more of it is played on the GPU")
@pytest.mark.parametrize("kind", ["keys2bit", "pca", "skip", "exact"])
def test_any_order_in_the_interpreter(kind: str) -> None:
    """Every address that a kernel reads or writes is in bounds, whatever came before."""
    on = operations("triton", kind, kv_heads=1)
    with memcheck() as checked:
        on.prompt(70, "left", SEED)
        player = Player(on, SEED, **SMALL)
        for _ in range(7):
            player.move()
        # The kernels run, whatever was drawn.
        on.decode(1, "none", SEED)
        on.repeat(2)
        on.decode(1, "none", SEED)
    on.check()
    assert checked.checked > 1000


@pytest.mark.parametrize("backend", ["reference", "triton"] if GPU else ["reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(SEED, SEED + (2 if GPU else 1)))
def test_any_order(backend: str, kind: str, seed: int) -> None:
    player = Player(operations(backend, kind, 1 + seed % 3), seed)
    for _ in range(40 if GPU else 25):
        player.move()


@pytest.mark.parametrize("backend", ["reference", "triton"] if GPU else ["reference"])
def test_several_caches_at_once(backend: str) -> None:
    """Each move is another cache's than the one before."""
    players = [
        Player(operations(backend, kind), SEED + n) for n, kind in enumerate(["keys2bit", "skip"])
    ]
    for _ in range(20):
        for player in players:
            player.move()


@pytest.mark.parametrize("backend", ["reference", "triton"] if GPU else ["reference"])
@pytest.mark.parametrize("streams", [False, True] if GPU else [False])
def test_caches_of_several_threads(backend: str, streams: bool) -> None:
    """Each thread has its own cache, and on a GPU perhaps a stream of its own."""
    failed: list[BaseException] = []
    start = threading.Barrier(3)

    def play(number: int) -> None:
        try:
            stream = torch.cuda.stream(torch.cuda.Stream()) if streams else nullcontext()
            with stream:
                player = Player(operations(backend, "keys2bit"), SEED + number)
                start.wait()
                for _ in range(40 if GPU else 12):
                    player.move()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_the_player_plays_everything() -> None:
    """No move is left out, and batches grow and shrink."""
    names: set[str] = set()
    sizes: list[int] = []
    for seed in range(4):
        player = Player(operations("reference", "keys2bit"), seed, (4, 2, MAX_ROWS))
        for _ in range(30):
            names.add(player.move())
            sizes.append(player.on.batch)
    assert names == set(WEIGHTS)
    steps = [after - before for before, after in pairwise(sizes)]
    assert min(steps) < 0 < max(steps)
