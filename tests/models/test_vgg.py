import torch

from batchbayes.models.vgg import SmallVGG


def test_every_layer_but_the_last_is_normalised() -> None:
    network = SmallVGG(num_classes=7, width=4)
    kinds = [type(module).__name__ for module in network.modules()]
    assert (kinds.count("BatchNorm2d"), kinds.count("BatchNorm1d")) == (3, 1)
    assert network(torch.randn(3, 1, 28, 28)).shape == (3, 7)
