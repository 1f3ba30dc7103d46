"""Sections of params.yaml that are too long for stages/params.py, which puts them together. Light to import: no torch."""
