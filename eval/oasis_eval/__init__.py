"""Evaluation of `OasisCache`: what is asked, what answers, and what is made of the answers.

Tasks are generated with a seed, in the model's own tokens, so that nothing is downloaded. Every
prompt is read once, densely; each arm (a cache with its options) then continues an identical copy.

    oasis-hf eval --preset smoke        tasks x arms, into a folder with a report
    oasis-hf report FOLDER [OTHER]      its report anew, or two runs side by side
    oasis-hf study needles              smaller studies, each with one JSON file of results
    oasis-hf tables, oasis-hf plots     what README and DESIGN show of eval/results

Folders: `material` (texts and words), `tasks` and `metrics`, `runs` (the models answer), `reports`,
`tables` and `plots`, `needles` and `studies`, `retrieval` (a small model that looks facts up) and
`peers` (methods of another library).
"""
