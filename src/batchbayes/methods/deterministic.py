"""The network as it is: the baseline that every method is compared with.

What is random: nothing. All draws are the network itself, in evaluation mode.
Cost: none for the fit; one forward pass for a prediction.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes.errors import BatchbayesError
from batchbayes.network.function import Network, Output, as_network, modules_by_name
from batchbayes.network.inputs import Picker
from batchbayes.patch import Patch
from batchbayes.posterior import Posterior


@dataclass(frozen=True, eq=False, repr=False)
class PointPosterior(Posterior):
    """A single function: the user's network."""

    kind: ClassVar[str] = "point"
    is_point: ClassVar[bool] = True  # type: ignore[misc]

    network: Network

    def __repr__(self) -> str:
        return f"{type(self).__name__}(deterministic on {self.network})"

    def draw(self, seed: int, index: int) -> Patch:
        return Patch(self.network)


def deterministic(model: nn.Module, *, inputs: Picker = None, output: Output = None) -> PointPosterior:
    """Return the network as it predicts by itself, with its running statistics. Any network will do.

    Args:
        model: any network.
        inputs: where the inputs are in a batch, for predictions that do not say it.
        output: which output counts, if the network returns a tuple or a dict.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    >>> x = torch.randn(4, 2)
    >>> bool((deterministic(network).draw(seed=0, index=0)(x) == network(x)).all())
    True
    """
    network = as_network(model, output, inputs)
    layers = modules_by_name(network.module, _BatchNorm)
    blind = [name for name, layer in layers.items() if layer.running_mean is None or layer.running_var is None]
    if blind:
        raise BatchbayesError(
            expected="batch-norm layers with running statistics",
            got=f"none (track_running_stats=False) in {', '.join(blind)}",
            fix="use population(model, batches), which computes them from the training data",
        )
    return PointPosterior(network)
