"""A multi-layer perceptron with batch normalisation."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from batchbayes.errors import BatchbayesError


class MLP(nn.Module):
    """Linear -> batch norm -> ReLU for each hidden width, then a linear output.

    A linear layer before batch norm has no bias: the batch mean would take it away again.

    >>> import torch
    >>> MLP(in_features=3, hidden_widths=[50, 50], out_features=1)(torch.zeros(4, 3)).shape
    torch.Size([4, 1])
    """

    def __init__(self, in_features: int, hidden_widths: Sequence[int], out_features: int) -> None:
        super().__init__()
        widths = [in_features, *hidden_widths]
        if min([*widths, out_features]) < 1:
            raise BatchbayesError(
                expected="widths of one or more",
                got=f"{in_features} inputs, hidden widths {list(hidden_widths)}, {out_features} outputs",
                fix="pass positive numbers",
            )
        self.hidden = nn.Sequential(
            *(
                nn.Sequential(
                    OrderedDict(linear=nn.Linear(before, after, bias=False), norm=nn.BatchNorm1d(after), relu=nn.ReLU())
                )
                for before, after in pairwise(widths)
            )
        )
        self.output = nn.Linear(widths[-1], out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, in_features) -> (N, out_features)."""
        return self.output(self.hidden(inputs))
