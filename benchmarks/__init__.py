"""Speed, measured side by side with what a user would run instead: TRL, transformers' `generate`, mergekit.

`make bench` or `python -m benchmarks`; the rules of the comparison are in `measure.py` and `trl_side.py`.
"""
