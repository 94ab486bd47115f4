"""Evaluation of `OasisCache`: tasks, metrics, arms side by side, and reports.

Tasks are generated with a seed, in the model's own tokens, so that nothing is downloaded. Every
prompt is read once, densely; each arm (a cache with its options) then continues an identical copy.

    oasis-hf eval --preset smoke
    oasis-hf report FOLDER OTHER_FOLDER
"""
