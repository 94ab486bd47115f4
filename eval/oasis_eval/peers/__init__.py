"""Methods of another library on the prompts of a run; they run in an environment of their own.

python -m oasis_eval.peers --help
"""
