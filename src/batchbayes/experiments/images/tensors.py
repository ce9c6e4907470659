"""Tensors as text, so that the result of a unit can hold a trained network or predictions.

The text is a safetensors file in base 64. Reading it executes no code.
"""

import base64
import binascii
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn


def pack_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return tensors as text.

    >>> import torch
    >>> unpack_tensors(pack_tensors({"a": torch.arange(3)}))["a"]
    tensor([0, 1, 2])
    """
    return base64.b64encode(save({name: tensor.contiguous() for name, tensor in tensors.items()})).decode("ascii")


def unpack_tensors(text: str) -> dict[str, Tensor]:
    """Return the tensors of a text that `pack_tensors` made. A damaged text is a ValueError."""
    try:
        return load(base64.b64decode(text, validate=True))
    except (SafetensorError, binascii.Error) as error:
        raise ValueError(f"tensors that cannot be read: {error}") from error


def pack_weights(network: nn.Module) -> str:
    """Return the weights and buffers of a network as text."""
    return pack_tensors(network.state_dict())


def unpack_weights(network: nn.Module, text: str) -> nn.Module:
    """Load weights from a text into a network, and set it to evaluation mode."""
    network.load_state_dict(unpack_tensors(text))
    return network.eval()
