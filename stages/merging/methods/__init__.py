"""Merge methods: one module each, whose file name is its name in `merge.method`."""
