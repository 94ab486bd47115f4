"""What would stop a run, found before its model is loaded."""

from __future__ import annotations

from typing import Any

from oasis_hf import OasisCache, OasisUnsupportedError

from ..config import ConfigError, EvalConfig
from ..material.prose import Prose
from ..tasks import drafted
from ..tasks.fill import check

LOOKED_AT = 4
"""Samples of a task and context that are tried; others take a few tokens more or fewer."""


def check_arms(model_config: Any, config: EvalConfig) -> None:
    """That the model takes every arm's options, such as layers that stay dense.

    Args:
        model_config: the model's, with attention "oasis".
        config: of the run.

    Raises:
        ConfigError: it does not, or cannot be served at all.
    """
    for arm in config.parsed_arms:
        # Prompts are read before an arm gets them, and a cache of a config alone reads none.
        options = {n: value for n, value in arm.options.items() if n != "prefill_chunk_size"}
        if arm.dense:
            continue
        try:
            OasisCache(model_config, **options)
        except (OasisUnsupportedError, ValueError) as error:
            raise ConfigError(f"arms: got {arm.name!r}: {error}") from error


def check_tasks(tokenizer: Any, config: EvalConfig, text: str) -> None:
    """That every task fits into every context.

    Args:
        tokenizer: the model's.
        config: of the run.
        text: real text, as `material.texts.read_text` gives it.

    Raises:
        ConfigError: one does not; says what it takes.
    """
    prose = Prose(text)
    for context in config.contexts:
        for task in config.tasks:
            for number in range(min(config.samples, LOOKED_AT)):
                try:
                    draft, _ = drafted(task, context, number, config.seed, prose)
                    check(tokenizer, draft, context)
                except ValueError as error:
                    said = str(error).removeprefix("context: ")
                    raise ConfigError(f"contexts: {task}: {said}") from error
