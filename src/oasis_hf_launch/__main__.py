"""`python -m oasis_hf_launch`, where the package is on the path but not installed."""

from . import main

if __name__ == "__main__":
    main()
