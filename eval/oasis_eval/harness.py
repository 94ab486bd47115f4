"""`OasisCache` in EleutherAI's lm-evaluation-harness: the model "oasis".

    python -m oasis_eval.harness --model oasis \\
        --model_args pretrained=NAME,dtype=bfloat16,budget=2048,on_miss=skip --tasks TASK

All else is the harness' own command line. Options of `OasisCache` are given among the model's.
Every batch of prompts is answered with a cache of its own. Only tasks that generate decode
sparsely: likelihoods are computed in one dense forward, and say nothing about sparse attention.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from oasis_hf import OasisCache
from oasis_hf.config import OasisConfig

OPTIONS = [name for name in OasisConfig.fields() if name != "backend"]
"""Of `OasisCache`; "backend" means something else to the harness."""


@register_model("oasis")
class OasisLM(HFLM):
    """The harness' own Transformers model, with an `OasisCache` for every generation.

    Args:
        pretrained: a Hub id, a folder, or a model.
        **kwargs: fields of `OasisConfig` except "backend", and the arguments of `HFLM`.

    Raises:
        OasisConfigError: an option of the cache cannot be used.
    """

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        self.options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        # Before the model is loaded, which may take minutes.
        OasisConfig(**self.options)
        if isinstance(pretrained, str):
            kwargs["attn_implementation"] = "oasis"
        else:
            pretrained.set_attn_implementation("oasis")
        super().__init__(pretrained=pretrained, **kwargs)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """Answer one batch of prompts `[B, T]` with a fresh cache."""
        cache = OasisCache(self.model, **self.options)
        return super()._model_generate(
            context, max_length, stop, past_key_values=cache, **generation_kwargs
        )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
