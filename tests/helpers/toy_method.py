"""A method of a third party: it registers itself when its module is imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes._common.rng import generator
from batchbayes.network.function import Function, Network, as_network
from batchbayes.posterior import Header, Posterior


@dataclass(frozen=True, eq=False)
class RipplePosterior(Posterior):
    """The network, with a random number added to each of its outputs."""

    kind: ClassVar[str] = "ripple"

    network: Network
    scale: Tensor

    def draw(self, seed: int, index: int) -> Function:
        noise = self.scale * torch.randn(len(self.scale), generator=generator(seed, "ripple", index))
        return lambda inputs: self.network(inputs) + noise

    def state(self) -> tuple[Header, dict[str, Tensor]]:
        return {}, {"scale": self.scale}

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        return cls(as_network(model), tensors["scale"])


def ripple(model: nn.Module, batches: object) -> RipplePosterior:
    return RipplePosterior(as_network(model), torch.tensor([0.1, 0.2, 0.3]))


bb.register(ripple, RipplePosterior, label="Ripple", about="a random number is added to each output")
