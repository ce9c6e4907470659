"""Networks as plain modules; there is no Bayesian code in them."""
