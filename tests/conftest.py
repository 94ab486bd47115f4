"""Settings that all tests share."""

import os
import warnings

# Nothing here may reach for a hub; both are read when Transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

# Read when triton is imported, which other libraries may do first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from oasis_hf import geometry
from oasis_hf.layers import ledger
from oasis_hf.storage import pinned_store


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models gain nothing from threads, and test processes would take turns."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="transformers")


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grow store and ledger by 64 tokens, not thousands: several slabs in a short context.

    The first slab and the resident pool begin at 32 tokens, not hundreds, and are replaced too.
    """
    monkeypatch.setattr(geometry, "LEAST_TOKENS", 32)
    monkeypatch.setattr(pinned_store, "LEAST_TOKENS", 32)
    monkeypatch.setattr(pinned_store, "GROWTH_TOKENS", 64)
    monkeypatch.setattr(ledger, "GROWTH_TOKENS", 64)
