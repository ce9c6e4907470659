"""Public weights, loaded from safetensors files that the user has."""

import os

import torch
from safetensors.torch import load_file
from torch import nn

from batchbayes.models.cifar_resnet import CifarResNet
from batchbayes.models.espnet import ESPNet


def load_weights(network: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load strictly, set evaluation mode, and lay images out as CPUs like them."""
    network.load_state_dict(load_file(path))
    return network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def cifar_resnet(depth: int, path: str | os.PathLike[str]) -> nn.Module:
    """ResNet-20 or ResNet-32 with weights of akamaster/pytorch_resnet_cifar10 (91.73 % and 92.63 %)."""
    return load_weights(CifarResNet(depth), path)


def espnet_camvid(path: str | os.PathLike[str]) -> nn.Module:
    """ESPNet with the CamVid weights of sacmehta/ESPNet (12 outputs, the last is "unlabelled")."""
    return load_weights(ESPNet(), path)
