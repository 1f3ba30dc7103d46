"""A run while it runs: curves and newest episodes in the viewer; pause, resume and stop from there and from the command line."""
