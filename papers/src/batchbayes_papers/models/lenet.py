"""The two LeNets of the literature on sparse networks, for 28 x 28 grey images."""

from collections import OrderedDict

from torch import Tensor, nn


class LeNet300(nn.Sequential):
    """Two hidden layers of 300 and 100 units: 266,200 weights.

    >>> sum(p.numel() for p in LeNet300().parameters() if p.ndim > 1)
    266200
    """

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                flatten=nn.Flatten(),
                dense1=nn.Linear(784, 300),
                relu1=nn.ReLU(),
                dense2=nn.Linear(300, 100),
                relu2=nn.ReLU(),
                dense3=nn.Linear(100, 10),
            )
        )


class LeNet5(nn.Sequential):
    """Two convolutions of 20 and 50 filters and a hidden layer of 500 units, as in Caffe: 430,500 weights.

    >>> sum(p.numel() for p in LeNet5().parameters() if p.ndim > 1)
    430500
    """

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, 20, 5),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(20, 50, 5),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                dense1=nn.Linear(800, 500),
                relu3=nn.ReLU(),
                dense2=nn.Linear(500, 10),
            )
        )


class NormalisedLeNet5(nn.Sequential):
    """LeNet-5 with batch norm after each layer but the last, and no biases, as variance networks have it.

    With `dropout`, a dropout layer stands before the hidden dense layer.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, 20, 5, bias=False),
                norm1=nn.BatchNorm2d(20),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(20, 50, 5, bias=False),
                norm2=nn.BatchNorm2d(50),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                dropout=nn.Dropout(dropout),
                dense1=nn.Linear(800, 500, bias=False),
                norm3=nn.BatchNorm1d(500),
                relu3=nn.ReLU(),
                dense2=nn.Linear(500, 10, bias=False),
            )
        )


class SmallLeNet(nn.Module):
    """Two 5 x 5 convolutions, which halve the image, and a dense layer, with batch norm and dropout.

    It is cheap, and good with few labels. All noise of dropout is in the `head`, so that features of images are needed
    only once for many draws.

    >>> import torch
    >>> SmallLeNet()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, width: int = 16, hidden: int = 128) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Dropout(0.25), nn.Linear(2 * width * 7 * 7, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(hidden, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, num_classes) of images (N, 1, 28, 28)."""
        return self.head(self.features(images))


def init_for_sparsity(network: nn.Module) -> None:
    """Draw initial weights as the code of sparse variational dropout does: small ones in dense layers, Glorot's in
    convolutions, and zero biases."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
        elif isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
        if isinstance(layer, nn.Linear | nn.Conv2d) and isinstance(layer.bias, Tensor):
            nn.init.zeros_(layer.bias)
