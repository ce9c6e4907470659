"""Every family of random weights, and a small network with data for it."""

import torch
from torch import nn

import batchbayes as bb

GAUSSIAN = {
    "mean field": bb.MeanField(initial_std=0.2),
    "sparse": bb.SparseVD(initial_log_var=-4.0),
    "dropout for layers": bb.VariationalDropout("layer"),
    "dropout for neurons": bb.VariationalDropout("neuron", "ard"),
    "dropout for weights": bb.VariationalDropout("weight"),
    "gaussian dropout": bb.GaussianDropout(),
    "variance": bb.Variance(),
    "variance, uniform": bb.Variance("uniform", degrees=3.0),
    "variance, bernoulli": bb.Variance("bernoulli"),
}

FAMILIES = GAUSSIAN | {"binary dropout": bb.BinaryDropout(), "flow": bb.MultiplicativeFlow()}
FAMILIES |= {"structured": bb.StructuredSparsity(initial_log_std=-0.5)}


def network(width=3, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, width, 3), norm(width), nn.ReLU(), nn.Flatten(), nn.Linear(4 * width, 2))


def data(count=12):
    torch.manual_seed(1)
    return [(torch.randn(4, 1, 4, 4), torch.randint(0, 2, (4,))) for _ in range(count)]
