"""Mutated parameters, records, imports and requests, and stages killed at random moments: `python -m tests.fuzz --help`."""
