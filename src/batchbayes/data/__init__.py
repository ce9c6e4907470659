"""Data sources, one file each; there is no Bayesian code in them."""
