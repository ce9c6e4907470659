"""The experiments of the MCBN paper.

Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks", ICML 2018.

Experiments: `uci`, `mnf_uci`, `batch_size`, `passes`, `toy`, `normality`, `cifar` and `camvid`. The other modules hold
what they share.
"""
