"""Stochastic batch normalisation (Atanov et al. 2018), and the batch size of a network (Mukhoti et al. 2020)."""
