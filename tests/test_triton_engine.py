"""The Triton engine against the torch one, step by step: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from oasis_hf.config import OasisConfig
from oasis_hf.index import keys2bit
from oasis_hf.layer import OasisLayer
from oasis_hf.ledger import PaddingLedger

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

CASES = {
    "keys2bit-fetch": {},
    "keys2bit-skip": {"on_miss": "skip"},
    "keys2bit-threshold": {"on_miss": 0.02},
    "keys2bit-uncapped": {"on_miss": "skip", "fetch_cap": None},
    "keys2bit-no-lookahead": {"on_miss": "skip", "fetch_cap": 0.0},
    "keys2bit-threshold-no-lookahead": {"on_miss": 0.2, "fetch_cap": 0.0},
    "keys2bit-candidates": {"budget": 16, "sink_tokens": 0, "least": 64},
    "minmax-fetch": {"index": "minmax"},
    "minmax-max": {"index": "minmax", "reduction": "max"},
    "minmax8-fetch": {"index": "minmax8"},
    "minmax8-float16": {"index": "minmax8", "dtype": torch.float16, "rows": 2},
    "mean-no-kernel": {"index": "mean"},
    "no-head-room": {"head_room": 1.0},
    "block-8": {"block_size": 8},
    "block-4": {"block_size": 4, "index": "minmax8"},
    "block-32": {"block_size": 32},
    "rows-3": {"rows": 3},
    "odd-dims": {"dim": 24, "v_dim": 40, "group": 3},
    "float16": {"dtype": torch.float16},
    # Triton's interpreter multiplies no bfloat16.
    **({"bfloat16": {"dtype": torch.bfloat16, "rows": 2}} if DEVICE.type == "cuda" else {}),
}


def build(
    backend: str, k: torch.Tensor, v: torch.Tensor, lengths: list[int], **options
) -> OasisLayer:
    """One layer that holds `lengths` tokens of k and v."""
    chosen = {"budget": 64, "sink_tokens": 16, "recent_tokens": 16, "max_rows": 4} | options
    layer = OasisLayer(OasisConfig(backend=backend, **chosen), 0, PaddingLedger())
    layer.adopt(k, v, torch.tensor(lengths, device=DEVICE), max(lengths))
    return layer


def assert_same(torch_layer: OasisLayer, triton_layer: OasisLayer) -> None:
    """Every table, summary and stored token of two layers, bit for bit."""
    assert torch.equal(torch_layer.lengths, triton_layer.lengths)
    assert torch.equal(torch_layer.committed, triton_layer.committed)
    blocks = int(torch_layer.committed.max()) // torch_layer.geometry.block
    resident = [
        (layer.residency.slot_of_block[..., :blocks] >= 0) for layer in (torch_layer, triton_layer)
    ]
    assert torch.equal(*resident)
    groups = int(torch_layer.committed.min()) // torch_layer.geometry.group
    for name, array in torch_layer.index.arrays.items():
        other = triton_layer.index.arrays[name]
        assert torch.equal(array[:, :, :groups], other[:, :, :groups]), name
    lengths = torch_layer.lengths.tolist()
    for ours, theirs in zip(
        torch_layer.history(lengths)[:2], triton_layer.history(lengths)[:2], strict=True
    ):
        assert torch.equal(ours, theirs)
    assert torch_layer.counters.read() == triton_layer.counters.read()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_engines_agree(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan, the same tables and the same output, across a flush of the tail."""
    options = dict(options)
    monkeypatch.setattr(keys2bit, "LEAST_CANDIDATES", options.pop("least", 8192))
    rows, dim = options.pop("rows", 1), options.pop("dim", 32)
    v_dim, group = options.pop("v_dim", dim), options.pop("group", 2)
    dtype = options.pop("dtype", torch.float32)
    torch.manual_seed(1)
    lengths = [271, 206]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    k, v = draw(2, 1, max(lengths), dim), draw(2, 1, max(lengths), v_dim)
    layers = [build(backend, k, v, lengths, **options) for backend in ("reference", "triton")]
    for layer in layers:
        layer.pool.k.fill_(float("nan"))
        layer.pool.v.fill_(float("nan"))
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-4)
    for step in range(4):
        query, key = draw(2, group, rows, dim) * 3, draw(2, 1, rows, dim)
        value = draw(2, 1, rows, v_dim)
        valid = torch.ones(2, rows, dtype=torch.bool, device=DEVICE)
        valid[1, 0] = step != 1
        outputs = []
        for layer in layers:
            layer._dense = False
            outputs.append(layer.attend(query, key, value, valid, dim**-0.5, new=True))
        torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)
    for layer in layers:
        layer.engine.join()
    assert_same(*layers)
    if options.get("fetch_cap") == 0:
        counts = layers[1].counters.read()
        assert counts["later"] == 0 and counts["hits"] + counts["now"] < counts["wanted"]


def test_prompt_pieces_go_through_the_same_store() -> None:
    """Dense calls read back what the copy kernel wrote, sequences of unequal length included."""
    torch.manual_seed(2)
    k, v = (torch.randn(2, 2, 200, 16, device=DEVICE) for _ in range(2))
    layers = [build(name, k, v, [200, 131], block_size=8) for name in ("reference", "triton")]
    key, value = (torch.randn(2, 2, 90, 16, device=DEVICE) for _ in range(2))
    query = torch.randn(2, 4, 90, 16, device=DEVICE)
    outputs = []
    for layer in layers:
        layer._dense = True
        outputs.append(layer.attend(query, key, value, None, 0.25, new=True))
    torch.testing.assert_close(*outputs)
    assert_same(*layers)
