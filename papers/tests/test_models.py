"""Networks of the papers: their layers and shapes."""

import torch
from batchbayes_papers.models.small_vgg import SmallVGG


def test_every_layer_of_the_small_vgg_but_the_last_is_normalised() -> None:
    network = SmallVGG(num_classes=7, width=4)
    kinds = [type(module).__name__ for module in network.modules()]
    assert (kinds.count("BatchNorm2d"), kinds.count("BatchNorm1d")) == (3, 1)
    assert network(torch.randn(3, 1, 28, 28)).shape == (3, 7)
