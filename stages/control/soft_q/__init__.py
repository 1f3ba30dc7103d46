"""Soft Q-functions over discretised actions, one dimension after the other."""
