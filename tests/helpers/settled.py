"""Rows of a table, and networks whose running statistics have settled on them."""

import torch
from torch import Tensor, nn

X = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))


def settled(network: nn.Module, inputs: Tensor = X) -> nn.Module:
    for _ in range(60):
        network.train()(inputs)
    return network.eval()
