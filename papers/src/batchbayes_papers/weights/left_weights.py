"""The picture of a sparse network: which weights are left, beside all that there were at the start."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import batchbayes as bb
from batchbayes.tools import Figure, house_style, new_figure
from batchbayes_papers.image_networks import new_network

DRAWN = {"LeNet-300-100": "dense1.weight", "LeNet-5": "dense1.weight"}
"""Networks that have a picture, and their largest weight."""
FILTERS, ACROSS = "conv1.weight", 5
"""The filters of the first layer of LeNet-5, and how many stand side by side."""


def left_weights(posterior: bb.WeightsPosterior) -> dict[str, dict[str, list[float]]]:
    """Return place and mean of each weight that is not zero, by name. Places count through the flat weight."""
    found = {}
    for name, given in posterior.distributions.items():
        flat = given.mean.flatten()
        places = flat.nonzero()[:, 0]
        found[name] = {"places": places.tolist(), "values": [round(value, 5) for value in flat[places].tolist()]}
    return found


def full_weight(left: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """Return the weight of which `left_weights` has kept the rest.

    >>> full_weight({"places": [0, 3], "values": [1.0, -2.0]}, torch.Size([2, 2]))
    tensor([[ 1.,  0.],
            [ 0., -2.]])
    """
    flat = torch.zeros(shape.numel())
    flat[torch.tensor(left["places"], dtype=torch.int64)] = torch.tensor(left["values"])
    return flat.view(shape)


def weights_figure(networks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the first layer as an image and the largest weight of each network, both at the start and at the end."""
    with house_style():
        figure, panels = new_figure(len(networks), 4, (12.8, 3.6 * len(networks)), share=False)
        for row, (name, left) in zip(panels, networks.items(), strict=True):
            start = new_network(name, seed=0).state_dict()
            ends = {key: full_weight(left[key], start[key].shape) for key in left}
            title = "filters" if FILTERS in start else "sum of |w| by pixel"
            for number, (when, weights) in enumerate((("start", start), ("end", ends))):
                _image(row[number], first_layer(weights))
                row[number].set_title(f"{name}, {title}: {when}")
                largest = weights[DRAWN[name]]
                row[number + 2].set_title(f"dense1, {when}: {int(largest.count_nonzero()):,} weights")
                (_points if when == "end" else _image)(row[number + 2], largest)
    return figure


def first_layer(weights: Mapping[str, Tensor]) -> Tensor:
    """Return the first layer as one image: filters side by side, or how much each pixel counts."""
    if FILTERS not in weights:
        return weights["dense1.weight"].abs().sum(0).view(28, 28)
    filters = torch.nn.functional.pad(weights[FILTERS][:, 0], (0, 1, 0, 1))  # (20, 6, 6)
    return torch.cat([torch.cat(list(row), 1) for row in filters.split(ACROSS)])


def _image(panel: Any, values: Tensor) -> None:
    """Draw a matrix by colours. Zero is almost white."""
    bound = max(float(values.abs().max()), 1e-9)
    panel.imshow(values.numpy(), cmap="RdBu", vmin=-bound, vmax=bound, aspect="equal", interpolation="nearest")
    panel.set(xticks=[], yticks=[])


def _points(panel: Any, values: Tensor) -> None:
    """Draw a point for each weight that is left, which as a pixel would be lost."""
    rows, columns = np.nonzero(values.numpy())
    panel.plot(columns, rows, ls="none", marker=".", ms=0.8, color="black")
    panel.set(xlim=(0, values.shape[1]), ylim=(values.shape[0], 0), aspect="equal", xticks=[], yticks=[])
