"""Whole decode steps as CUDA graphs: captured, with compiled layers and merged products."""
