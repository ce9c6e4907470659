"""Experiments on random weights: sparse variational dropout, variance networks, normalising flows."""
