"""Networks whose weights are random and are trained to be so: variational inference.

`sites` finds the weights of a network, `family` says what a distribution of weights is, `noisy` puts one into any
network, `variational` trains it by the ELBO, and `posterior` is the result. Each family has its own file.
"""
