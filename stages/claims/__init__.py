"""The claims board: published claims as experiments that the ordinary stages run, and their verdicts."""
