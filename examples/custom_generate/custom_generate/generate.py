"""What `model.generate(custom_generate="<this folder>", trust_remote_code=True)` runs."""

from oasis_hf.generation import generate

__all__ = ["generate"]
