"""Data sources, one file for each. They contain no Bayesian code."""
