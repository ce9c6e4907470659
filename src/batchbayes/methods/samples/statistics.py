"""Running statistics of batch norm, computed anew from training batches for given weights."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchbayes.batches import Batches, Picker, as_batches, input_stream
from batchbayes.errors import BatchbayesError
from batchbayes.network import Network, modules_by_name


@torch.no_grad()
def running_statistics(
    network: Network, tensors: Mapping[str, Tensor], batches: Batches, inputs: Picker = None
) -> dict[str, Tensor]:
    """Return the running means and variances of all batch-norm layers, under weights `tensors`.

    They are the plain means of the statistics of the batches, as `torch.optim.swa_utils.update_bn` computes them: the
    variances are unbiased, and each batch counts the same.
    """
    layers = modules_by_name(network.module, _BatchNorm)
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def look(name: str, values: Tensor) -> None:
        variance, mean = torch.var_mean(values, [axis for axis in range(values.ndim) if axis != 1])
        seen[f"{name}.running_mean"].append(mean)
        seen[f"{name}.running_var"].append(variance)

    blank: dict[str, Tensor | None] = {f"{n}.running_{kind}": None for n in layers for kind in ("mean", "var")}
    before = {name: lambda values, name=name: look(name, values) for name in layers}
    for batch in input_stream(as_batches(batches), inputs):
        network(batch.to(network.device), tensors={**tensors, **blank}, before=before)
    if not seen:
        raise BatchbayesError(
            expected="training batches, and a network with batch norm",
            got=f"{len(layers)} batch-norm layers, and none of them saw a batch",
            fix="pass a list or a DataLoader, since each member reads the batches, and an iterator can be read only "
            "once; a network without batch norm has no running statistics",
        )
    return {name: torch.stack(parts).mean(0) for name, parts in seen.items()}
