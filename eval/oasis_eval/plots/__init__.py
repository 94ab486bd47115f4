"""The plots of the reports, of README and of DESIGN, from eval/results: `oasis-hf plots`."""
