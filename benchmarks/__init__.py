"""Speed compared with the alternatives: TRL, transformers' `generate`, mergekit.

`make bench` or `python -m benchmarks`; the rules of the comparison are in `measure.py` and `trl_side.py`.
"""
