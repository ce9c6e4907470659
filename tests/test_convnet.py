from itertools import pairwise

import pytest
import torch
from torch import nn

from batchbayes.models import ConvNet


@pytest.mark.parametrize("size", [4, 8, 28])
def test_takes_images_of_any_size(size: int) -> None:
    assert ConvNet(num_classes=7, width=4)(torch.randn(3, 1, size, size)).shape == (3, 7)


def test_batch_norm_follows_every_convolution_and_takes_its_bias() -> None:
    modules = list(ConvNet(width=4).modules())
    after = [(one, next_one) for one, next_one in pairwise(modules) if isinstance(one, nn.Conv2d)]
    assert len(after) == 3
    for convolution, norm in after:
        assert convolution.bias is None
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.num_features == convolution.out_channels


def test_in_evaluation_mode_a_prediction_does_not_depend_on_its_neighbours() -> None:
    network, images = ConvNet(width=4).eval(), torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(network(images)[:2], network(images[:2]))
