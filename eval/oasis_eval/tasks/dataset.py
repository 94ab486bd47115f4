"""Data sets for a run, made by processes of their own where the model leaves cores idle."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from datasets import Dataset

from ..material.prose import Prose
from . import sample
from .parts import FEATURES, Sample

MOST_WORKERS = 12

_shared: tuple[Any, Prose, int] | None = None
"""Tokenizer, prose and seed, which processes inherit: they are large."""


class Generator:
    """Makes the samples of a run.

    Args:
        tokenizer: the model's.
        prose: real text.
        seed: of everything that is drawn.
        workers: processes; none for this one. They are forked at the first call, so that is best
            made before much memory is taken.
    """

    def __init__(self, tokenizer: Any, prose: Prose, seed: int, workers: int = 0) -> None:
        self._state = (tokenizer, prose, seed)
        self._pool: ProcessPoolExecutor | None = None
        self._begun: dict[tuple[str, int, int], Iterator[Sample]] = {}
        if workers:
            # Tokenizers warn, and use one thread, where a process was forked after their use.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            self._pool = ProcessPoolExecutor(
                workers, multiprocessing.get_context("fork"), _remember, self._state
            )

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def begin(self, task: str, context: int, samples: int) -> None:
        """Have the processes, if there are any, make what will be asked for."""
        if self._pool is not None:
            keys = [(task, context, number) for number in range(samples)]
            self._begun[task, context, samples] = self._pool.map(_made, keys)

    def build(self, task: str, context: int, samples: int) -> Dataset:
        """The first samples of a task; fewer are the first of more.

        Raises:
            ValueError: the task does not fit into `context`.
        """
        begun = self._begun.pop((task, context, samples), None)
        if begun is None:
            keys = ((task, context, number) for number in range(samples))
            begun = (_sample(self._state, key) for key in keys)
        return Dataset.from_list(list(begun), features=FEATURES)


def _remember(*state: Any) -> None:
    global _shared
    _shared = state


def _made(key: tuple[str, int, int]) -> Sample:
    assert _shared is not None
    return _sample(_shared, key)


def _sample(state: tuple[Any, Prose, int], key: tuple[str, int, int]) -> Sample:
    (tokenizer, prose, seed), (task, context, number) = state, key
    return sample(task, tokenizer, context, number, seed, prose)


def idle_cores(model: Any) -> int:
    """Processes that may make samples: none beside a model that runs on the cores itself."""
    if model.device.type != "cuda":
        return 0
    return max(0, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 2))
