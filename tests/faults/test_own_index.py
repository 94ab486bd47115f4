"""An index of one's own that breaks the contract is named, before anything is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FULL, Driver, forward, generate, prompt, tiny_model
from torch import Tensor

import oasis_hf.index
from oasis_hf import Index, OasisCache, OasisConfigError
from oasis_hf.index import base
from oasis_hf.index.checks import check_index
from oasis_hf.ops import kernels

CALLS = {"encode": 0}


class Mean(Index):
    """A good one: the mean key of a block."""

    name = "own-mean"

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.float().mean(-2)}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return query @ self.arrays["mean"][:, :, :-1].transpose(-1, -2)


class Sum(Mean):
    """One that does estimate mass."""

    name = "own-sum"
    estimates_mass = True

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"keys": keys}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        keys = self.arrays["keys"][:, :, :-1].float().flatten(2, 3)
        return (query @ keys.transpose(-1, -2)).unflatten(-1, (-1, self.block)).logsumexp(-1)


class Pairs(Mean):
    """Two blocks of a group, ranked alike."""

    name = "own-pairs"

    @classmethod
    def group_tokens(cls, block: int) -> int:
        return 2 * block

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return super().block_logits(query, live).repeat_interleave(2, -1)


class ForgetsTheSpill(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return query @ self.arrays["mean"].transpose(-1, -2)


class ReturnsNaN(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return super().block_logits(query, live) * float("nan")


class ReturnsInfinity(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return torch.full_like(super().block_logits(query, live), float("inf"))


class ScoresRowsTogether(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return super().block_logits(query, live).amax(2)


class ScoresInHalf(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return super().block_logits(query, live).bfloat16()


class ScoresInNumpy(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Any:
        return super().block_logits(query, live).numpy()


class ChangesLive(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        live.zero_()
        return super().block_logits(query, live)


class ChangesItsArrays(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        self.arrays["mean"] /= 2
        return super().block_logits(query, live)


class Raises(Mean):
    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return query @ self.arrays["means"]


class OneSummaryForAll(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.mean((2, 3))[:, :, None]}


class TheSameForEveryGroup(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        mean = keys.float().mean((2, 3), keepdim=True)[:, :, :, 0]
        return {"mean": mean.expand(-1, -1, keys.shape[2], -1)}


class HeadsTogether(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.mean((1, 3))[:, None]}


class OneNumber(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.mean((3, 4))}


class EncodesATensor(Mean):
    def encode(self, keys: Tensor) -> Any:
        return keys.mean(-2)


class EncodesNumbers(Mean):
    def encode(self, keys: Tensor) -> Any:
        return {"mean": 0.0}


class EncodesNaN(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": (keys - keys.amax(-2, keepdim=True)).log().mean(-2)}


class ChangesNames(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        CALLS["encode"] += 1
        return {f"mean{CALLS['encode'] % 2}": keys.mean(-2)}


class ChangesSizes(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.mean(-2)[..., : 8 + keys.shape[2]]}


class DrawsAtRandom(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.mean(-2) + torch.randn(keys.shape[-1])}


class WritesToKeys(Mean):
    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"mean": keys.mul_(2).mean(-2)}


class LiesAboutMass(Mean):
    estimates_mass = True


class OddGroup(Mean):
    @classmethod
    def group_tokens(cls, block: int) -> int:
        return block + 1


class HalfAGroup(Mean):
    @classmethod
    def group_tokens(cls, block: int) -> int:
        return block // 2


class NoName(Index):
    encode, block_logits = Mean.encode, Mean.block_logits


class TakenName(Mean):
    name = "minmax"


class MassInWords(Mean):
    estimates_mass = "yes"  # type: ignore[assignment]


class Unfinished(Index):
    name = "unfinished"

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {}


AT_ONCE = {
    OddGroup: "got 17 from group_tokens(16), expected a whole multiple of the block size, 16",
    HalfAGroup: "got 8 from group_tokens(16)",
    NoName: "got the name None, expected a text such as 'noname'",
    TakenName: "got the name 'minmax', which is that of a built-in index",
    MassInWords: "got estimates_mass='yes', expected True or False",
    Unfinished: "got a class without block_logits",
}

WHEN_BUILT = {
    ForgetsTheSpill: "block_logits: got (2, 2, 5, 4), expected (2, 2, 5, 3), [batch, heads, query "
    "rows, blocks]; the last entry of every array is the spill",
    ReturnsNaN: "block_logits: got NaN or +inf",
    ReturnsInfinity: "block_logits: got NaN or +inf",
    ScoresRowsTogether: "block_logits: got (2, 2, 3), expected (2, 2, 5, 3)",
    ScoresInHalf: "block_logits: got torch.bfloat16, expected torch.float32",
    ScoresInNumpy: "block_logits: got a ndarray, expected a tensor",
    ChangesLive: "block_logits: got self.arrays or 'live' changed",
    ChangesItsArrays: "block_logits: got self.arrays or 'live' changed",
    Raises: "block_logits: raised KeyError: 'means'",
    OneSummaryForAll: "encode: part 'mean': got (2, 2, 1, 16), expected (2, 2, 3) and at least one",
    TheSameForEveryGroup: "encode: part 'mean': got other values for a group alone",
    HeadsTogether: "encode: part 'mean': got (2, 1, 3, 16), expected (2, 2, 3)",
    OneNumber: "encode: part 'mean': got (2, 2, 3), expected (2, 2, 3) and at least one more",
    EncodesATensor: "encode: got a Tensor, expected a dict",
    EncodesNumbers: "encode: part 'mean': got a float, expected a tensor",
    EncodesNaN: "encode: part 'mean': got NaN or infinity for finite keys",
    ChangesNames: "expected the same names, dtypes and sizes in every call",
    ChangesSizes: "expected the same names, dtypes and sizes in every call",
    DrawsAtRandom: "encode: part 'mean': got other values for a group alone",
    WritesToKeys: "encode: got its keys written to",
    LiesAboutMass: "block_logits: got 0.00 for a query of zeros, expected log(block size) = 2.77",
}


@pytest.mark.parametrize("index", AT_ONCE, ids=lambda index: index.__name__)
def test_class_that_cannot_be_an_index(index: type[Index]) -> None:
    with pytest.raises(OasisConfigError) as error:
        OasisCache(tiny_model("llama"), **FULL, index=index)
    assert f"index {index.__name__}: {AT_ONCE[index]}" in str(error.value)


@pytest.mark.parametrize("index", WHEN_BUILT, ids=lambda index: index.__name__)
def test_index_that_breaks_its_contract(index: type[Index]) -> None:
    """The first forward raises, by name, and no token is stored."""
    model = tiny_model("llama")
    cache = OasisCache(model, **FULL, index=index)
    with pytest.raises(OasisConfigError) as error:
        forward(model, prompt(60), cache)
    assert f"index {index.__name__}: " in str(error.value)
    assert WHEN_BUILT[index] in str(error.value)
    assert cache.get_seq_length() == 0 and cache.stats().host_bytes == 0


@pytest.mark.parametrize("index", [Mean, Sum, Pairs])
def test_good_index_is_let_through(index: type[Index]) -> None:
    """Under autocast too, in 16 bits, and in blocks of other sizes."""
    for dtype in (torch.float32, torch.bfloat16):
        for block in (1, 4, 16):
            driver = Driver(budget=16, sink_tokens=0, block_size=block, index=index)
            generator = torch.Generator().manual_seed(0)
            driver.feed_random(generator, 2, 100)
            driver.feed_random(generator, 2, 1)
            states = torch.randn(1, 2, 3, 16, generator=generator).to(dtype)
            with torch.autocast("cpu", torch.bfloat16):
                oasis_hf.index.build_index(index, block, 4, "mean", 1, states)


class FailsOnLongKeys(Mean):
    """Passes with keys of usual size; those of the model's own are longer."""

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        mean = self.arrays["mean"][:, :, :-1]
        mean = torch.where(mean.abs().amax() > 100, float("nan"), mean)
        return query @ mean.transpose(-1, -2)


def test_first_scores_of_real_keys_are_looked_at() -> None:
    """And not those of later steps, which would each wait for the device."""
    driver = Driver(budget=16, sink_tokens=0, block_size=16, index=FailsOnLongKeys)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, 2, 100, 16, generator=generator)
    driver.feed(states[0].repeat(1, 2, 1, 1), 1000 + states[1], states[2])
    token = torch.randn(1, 2, 1, 16, generator=generator)
    with pytest.raises(OasisConfigError, match="index FailsOnLongKeys: block_logits: got NaN"):
        driver.feed(token.repeat(1, 2, 1, 1), token, token)


def test_an_index_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(base, "check_scores", lambda *args: looked.append(1))
    model = tiny_model("llama")
    cache = OasisCache(model, budget=32, index=Mean)
    generate(model, prompt(150), cache, 10)
    assert len(looked) == len(cache.layers)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("index", sorted(oasis_hf.index.INDEXES))
def test_built_in_indexes_pass_the_same_checks(index: str, block: int) -> None:
    """They are exempt only because they would pass."""
    kind, ops = oasis_hf.index.INDEXES[index], kernels("reference")
    check_index(lambda: kind(block, 4, "mean", ops), 2, torch.zeros(1, 2, 3, 16))
