"""`python -m oasis_hf.cli`, where the package is on the path but not installed."""

from . import app

if __name__ == "__main__":
    app(prog_name="oasis-hf")
