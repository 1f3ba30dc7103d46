"""Runs the methods of lane control over seeds, with learning curves and films."""
