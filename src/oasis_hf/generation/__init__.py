"""Speculative decoding of whole batches: `generate`, for Transformers' `custom_generate`.

Transformers refuses drafts for more than one sequence. Here every row of a batch accepts its own
number of them, with an `OasisCache` or a `DynamicCache`.
"""

from .front import SpeculativeOutput, generate
from .speculation import Speculation, SpeculationReport

__all__ = ["Speculation", "SpeculationReport", "SpeculativeOutput", "generate"]
