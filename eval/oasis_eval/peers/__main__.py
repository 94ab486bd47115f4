"""`python -m oasis_eval.peers`, in the environment that kvpress has."""

from .press import main

if __name__ == "__main__":
    main()
