"""The tables of README and DESIGN, from eval/results: `oasis-hf tables`."""
