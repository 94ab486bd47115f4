"""Which models of the installed Transformers an `OasisCache` serves, tried on tiny random ones."""

from __future__ import annotations

import inspect
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from ..cache import OasisCache
from ..facts import compat
from ..facts.handle import OasisUnsupportedError
from ..integration.attention import NAME
from . import tiny

EXACT, PARTLY, REFUSED = "exact", "delegated in part", "refused"
UNTESTABLE, WRONG = "not testable", "WRONG"

# Several blocks and groups are filled, sliding windows passed, and the third decoded token moves a
# group out of the tail. The short prompt is padded to the length of the long one.
PROMPT, SHORT, STEPS = 158, 101, 4
REAL = SHORT + STEPS
BUDGET = 256

TOLERANCE = 1e-4
"""Largest difference between logits, as a share of the largest logit."""


@dataclass(frozen=True)
class Verdict:
    """What became of one model type.

    Attributes:
        model_type: as in the config.
        class_name: the model class.
        status: "exact", "delegated in part", "refused", "not testable" or "WRONG".
        detail: the reason, or remarks.
        offloaded: layers that the cache offloads.
        native: layers left to Transformers' own cache layers.
        error: largest difference between logits, as a share of the largest logit.
        seconds: time it took.
    """

    model_type: str
    class_name: str
    status: str = UNTESTABLE
    detail: str = ""
    offloaded: int = 0
    native: int = 0
    error: float = 0.0
    seconds: float = 0.0


class _Untestable(Exception):
    """The model cannot be tried, whatever the cache."""


class _Wrong(Exception):
    """It computes something else than by itself."""


def survey(model_type: str, **options: Any) -> Verdict:
    """Try one model type.

    With `OasisCache` at full budget the model must give the logits and greedy tokens that it gives
    with eager attention and `DynamicCache`: for a prompt, for decoded tokens, and for a batch with
    left padding. With attention "oasis" and `DynamicCache` it must give them too, or refuse.

    Args:
        model_type: one of `tiny.model_types()`.
        **options: of the cache; a smaller budget shows that the comparison can fail.
    """
    start = time.perf_counter()
    verdict = Verdict(model_type, tiny.class_name(model_type))
    try:
        verdict = _try(verdict, {"budget": BUDGET, **options})
    except OasisUnsupportedError as error:
        verdict = replace(verdict, status=REFUSED, detail=str(error))
    except _Wrong as error:
        verdict = replace(verdict, status=WRONG, detail=str(error))
    except _Untestable as error:
        verdict = replace(verdict, detail=str(error))
    return replace(verdict, seconds=round(time.perf_counter() - start, 3))


def _try(verdict: Verdict, options: dict[str, Any]) -> Verdict:
    config, remarks = _config(verdict.model_type)
    dense, ours = _models(config, verdict.class_name)
    trial, failure = None, ""
    try:
        trial = _Trial(dense)
    except Exception as error:
        failure = _brief(error)
    if trial is not None:
        remarks += _with_other_cache(trial, ours, config)
    cache = OasisCache(ours, **options)
    if trial is None:
        raise _Untestable(f"fails with its own DynamicCache: {failure}")
    alone = trial.compare(ours, cache)
    seen = {layer.columns for layer in cache.offloaded}
    if seen == {0}:
        raise _Untestable("does not use the cache that it is given")
    # A layer that shares the K and V of another one gets none itself.
    if not seen <= {0, PROMPT + STEPS}:
        raise _Wrong(f"offloaded layers hold {sorted(seen)} of {PROMPT + STEPS} tokens")
    padded, more = trial.compare_padded(ours, OasisCache(ours, **options))
    native = [x for x in cache.layers if compat.is_sliding(x) or compat.is_linear(x)]
    return replace(
        verdict,
        status=PARTLY if native else EXACT,
        detail="; ".join(remarks + more),
        offloaded=len(cache.offloaded),
        native=len(native),
        error=max(alone, padded),
    )


def _config(model_type: str) -> tuple[PreTrainedConfig, list[str]]:
    """A tiny config with a layer to offload if it can have one, and remarks."""
    try:
        config = tiny.tiny_config(model_type)
    except Exception as error:
        raise _Untestable(f"no tiny config can be built: {_brief(error)}") from error
    own = vars(config)
    if own.get("sliding_window") and not own.get("layer_types"):
        with suppress(Exception):
            if all(compat.is_sliding(layer) for layer in compat.native_layers(config)):
                config = tiny.tiny_config(model_type, sliding_window=None)
                return config, ["only without a sliding window in its config"]
    return config, []


def _models(config: PreTrainedConfig, class_name: str) -> tuple[Any, Any]:
    """The same weights under eager attention and under attention "oasis"."""
    try:
        dense = tiny.tiny_model(config, class_name, "eager")
    except Exception as error:
        raise _Untestable(f"no tiny model can be built: {_brief(error)}") from error
    try:
        return dense, tiny.tiny_model(config, class_name, NAME)
    except Exception as error:
        raise OasisUnsupportedError(
            f"Transformers does not build it with attention {NAME!r}: {_brief(error)}"
        ) from error


class _Trial:
    """What one model should compute, and for which inputs."""

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 100, (2, PROMPT + STEPS), generator=generator)
        self.model = model
        self.ids = ids[:1].clone()
        self.want = _decode(model, _native(model), self.ids, choose=True)
        if not torch.isfinite(self.want).all():
            raise ValueError("its logits are not finite")
        self.mask = torch.ones_like(ids)
        self.mask[1, :-REAL] = 0
        self.pair = torch.cat([self.ids, ids[1:]]) * self.mask

    def compare(self, model: Any, cache: Any) -> float:
        """Largest difference of another model and cache for the unpadded prompt.

        Raises:
            _Wrong: it is beyond the tolerance, a greedy token differs, or the model fails.
        """
        return _difference(_checked(model, cache, self.ids), self.want)

    def compare_padded(self, model: Any, cache: Any) -> tuple[float, list[str]]:
        """The same for the batch with left padding, if the model itself gets that right.

        Only the logits of real tokens are asked for, as `generate` asks for the last one's only.
        """
        try:
            want = _decode(self.model, _native(self.model), self.pair, self.mask)[:, -REAL:]
        except Exception as error:
            return 0.0, [f"left padding fails, as with DynamicCache: {_brief(error)}"]
        try:
            got = _checked(model, cache, self.pair, self.mask, keep=SHORT)
            return _difference(got, want, "with left padding, "), []
        except OasisUnsupportedError as error:
            return 0.0, [f"left padding is refused: {error}"]
        except _Wrong:
            # What a model computes at padding is nobody's; some let it reach the other tokens.
            alone = _decode(self.model, _native(self.model), self.pair[1:, -REAL:])
            if _same(want[:1], self.want[:, -REAL:]) and _same(want[1:], alone):
                raise
            return 0.0, ["no left padding, as with DynamicCache"]


def _with_other_cache(trial: _Trial, ours: Any, config: PreTrainedConfig) -> list[str]:
    """Attention "oasis" without an `OasisCache`: as eager, or as sdpa if that differs, or refused.

    Raises:
        _Wrong: it is none of these.
    """
    try:
        got = _checked(ours, _native(ours), trial.ids, keep=STEPS)
        _difference(got, trial.want[:, -2 * STEPS :])
        return []
    except OasisUnsupportedError as error:
        return [f"other caches are refused: {error}"]
    except _Wrong as error:
        wrong = error
    with suppress(Exception):
        sdpa = tiny.tiny_model(config, type(ours).__name__, "sdpa")
        want = _decode(sdpa, _native(sdpa), trial.ids, keep=STEPS)
        if _same(_decode(ours, _native(ours), trial.ids, keep=STEPS), want):
            return ["its own sdpa differs from eager"]
    raise _Wrong(f"attention {NAME!r} with DynamicCache: {wrong}")


def _native(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def _checked(model: Any, cache: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`_decode`, with every failure but a refusal an error of the cache."""
    try:
        return _decode(model, cache, *args, **kwargs)
    except (OasisUnsupportedError, _Wrong):
        raise
    except Exception as error:
        raise _Wrong(f"fails: {_brief(error)}") from error


@torch.no_grad()
def _decode(
    model: Any,
    cache: Any,
    ids: Tensor,
    mask: Tensor | None = None,
    keep: int = 0,
    choose: bool = False,
) -> Tensor:
    """Logits `[B, T, vocabulary]` of a prompt and, one by one, of the last tokens of `ids`.

    Args:
        model: any causal language model.
        cache: any cache.
        ids: `[B, T]`.
        mask: `[B, T]`, zero for padding.
        keep: how many of the prompt's logits to ask for, from its end; 0 for all.
        choose: write the greedy tokens over the last tokens of `ids`.
    """
    torch.manual_seed(0)  # Some models hash at random.
    takes, total = inspect.signature(model.forward).parameters, ids.shape[1]
    logits: list[Tensor] = []
    for start in (0, *range(total - STEPS, total)):
        end = start + 1 if start else total - STEPS
        inputs: dict[str, Any] = {compat.cache_kwarg(model): cache, "use_cache": True}
        if mask is not None:
            inputs["attention_mask"] = mask[:, :end]
            if "position_ids" in takes:
                inputs["position_ids"] = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]
        if "logits_to_keep" in takes and not start:
            inputs["logits_to_keep"] = keep
        if choose and start:
            ids[:, start] = logits[-1][:, -1].argmax(-1)
        try:
            logits.append(model(input_ids=ids[:, start:end], **inputs).logits)
        except OasisUnsupportedError as error:
            if start and isinstance(cache, OasisCache):
                raise _Wrong(f"refused only after the first forward: {error}") from error
            raise
    return torch.cat(logits, 1)[:, -(keep or total) - STEPS :]


def _same(got: Tensor, want: Tensor) -> bool:
    try:
        _difference(got, want)
    except _Wrong:
        return False
    return True


def _difference(got: Tensor, want: Tensor, where: str = "") -> float:
    """Largest difference, as a share of the largest wanted logit.

    Raises:
        _Wrong: it is beyond the tolerance, or a greedy token differs.
    """
    error = float((got - want).abs().max() / want.abs().max())
    if not error <= TOLERANCE:
        row = int((got - want).abs().amax((0, 2)).argmax()) - got.shape[1]
        raise _Wrong(f"{where}logits differ by {error:.0e} of the largest, most at token {row}")
    if not torch.equal(got.argmax(-1), want.argmax(-1)):
        raise _Wrong(f"{where}greedy tokens differ")
    return error


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:157] + '...'}"
