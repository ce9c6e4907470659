"""The experiments of the MCBN paper.

Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks", ICML 2018.

Experiments: `uci`, `batch_size`, `passes`, `toy` and `normality`. The other modules hold what several of them share.
"""
