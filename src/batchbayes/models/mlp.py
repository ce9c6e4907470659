"""A multi-layer perceptron with batch normalisation, with dropout, or with neither."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from batchbayes.errors import BatchbayesError


class MLP(nn.Module):
    """A linear layer, batch norm and ReLU for each hidden width, then a linear output layer.

    A linear layer before batch norm has no bias: batch norm would subtract it again. With dropout, every linear layer
    drops some of its inputs, and the first one drops raw features, as in the networks of the MCBN paper.

    >>> MLP(in_features=3, hidden_widths=[50, 50], out_features=1)(torch.zeros(4, 3)).shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        in_features: int,
        hidden_widths: Sequence[int],
        out_features: int,
        *,
        norm: bool = True,
        epsilon: float = 1e-5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden_widths]
        if min([*widths, out_features]) < 1:
            raise BatchbayesError(
                expected="widths of one or more",
                got=f"{in_features} inputs, hidden widths {list(hidden_widths)}, {out_features} outputs",
                fix="pass positive numbers",
            )
        self.hidden = nn.Sequential()
        for before, after in pairwise(widths):
            layer = OrderedDict[str, nn.Module]()
            if dropout:
                layer["dropout"] = SeededDropout(dropout)
            layer["linear"] = nn.Linear(before, after, bias=not norm)
            if norm:
                layer["norm"] = nn.BatchNorm1d(after, eps=epsilon)
            layer["relu"] = nn.ReLU()
            self.hidden.append(nn.Sequential(layer))
        self.dropout = SeededDropout(dropout) if dropout else None
        self.output = nn.Linear(widths[-1], out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (N, out_features) of inputs (N, in_features)."""
        hidden = self.hidden(inputs)
        return self.output(self.dropout(hidden) if self.dropout else hidden)


class SeededDropout(nn.Dropout):
    """Dropout that compares uniform random numbers with a threshold, so that other code can draw the same mask.

    It also draws numbers at rate zero. So networks with different rates see the same numbers.

    >>> _ = torch.manual_seed(0)
    >>> SeededDropout(0.5)(torch.ones(6))
    tensor([0., 2., 0., 0., 0., 2.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Set each number to zero with probability p, and scale up the others."""
        if not self.training:
            return input
        return input * (torch.rand_like(input) >= self.p) / (1 - self.p)
