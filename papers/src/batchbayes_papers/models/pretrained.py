"""Load public weights from safetensors files of the user."""

import os

import torch
from safetensors.torch import load_file
from torch import nn

from batchbayes_papers.models.cifar_resnet import CifarResNet
from batchbayes_papers.models.espnet import ESPNet


def load_weights(network: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load all weights, set evaluation mode, and use the memory layout that is fastest on CPUs."""
    network.load_state_dict(load_file(path))
    return network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def cifar_resnet(depth: int, path: str | os.PathLike[str]) -> nn.Module:
    """Return ResNet-20 or ResNet-32 with weights of akamaster/pytorch_resnet_cifar10 (accuracy 91.73 % and 92.63 %)."""
    return load_weights(CifarResNet(depth), path)


def espnet_camvid(path: str | os.PathLike[str]) -> nn.Module:
    """Return ESPNet with the CamVid weights of sacmehta/ESPNet (12 outputs; the last one is "unlabelled")."""
    return load_weights(ESPNet(), path)
