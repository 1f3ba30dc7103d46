"""Predators that hunt together on a grid: what each contributes to the team's return."""
