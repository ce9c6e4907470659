"""Networks as plain modules. They contain no Bayesian code."""
