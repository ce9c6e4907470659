"""Random weights: sparse variational dropout, variance networks, few bits, random labels, gradient estimators."""
