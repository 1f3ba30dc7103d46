"""The pages of reports/claims, made from the experiments and their results."""
