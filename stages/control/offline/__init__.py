"""Learning from data sets in Minari's format, and making them."""
