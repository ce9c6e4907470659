"""The networks of the papers, as plain modules. They contain no Bayesian code."""
