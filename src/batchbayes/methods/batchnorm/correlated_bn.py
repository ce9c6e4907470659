"""Correlated stochastic BN: the noise of the batch statistics as one Gaussian across channels and layers.

What is random: the mean and the log standard deviation by which every batch-norm layer normalises.
q(omega): a Gaussian with the full covariance across channels and layers, in low rank: a draw is a random combination of
the observed deviations.
Cost: that of MCBN.
Reference: ours. Stochastic BN (Atanov et al. 2018) has independent Gaussians.
"""

from typing import Unpack

from torch import nn

from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.batchnorm.statistics import FitOptions
from batchbayes.methods.batchnorm.stochastic_bn import stochastic_bn
from batchbayes.network.source import Batches


def correlated_bn(model: nn.Module, batches: Batches, **options: Unpack[FitOptions]) -> BatchNormPosterior:
    """Fit `stochastic_bn` with the full covariance across channels and layers; the options are the same.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> correlated_bn(network, torch.randn(100, 2), batch_size=10).noise
    'correlated'
    """
    return stochastic_bn(model, batches, covariance="correlated", **options)
