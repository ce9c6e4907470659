"""Noise in the weights of a policy (Neklyudov et al. 2019): CartPole and Acrobot."""
