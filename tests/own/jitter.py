"""A method of a third party: Gaussian noise in all weight matrices. It is registered by its last line."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

import batchbayes as bb
from batchbayes.tools import Network, as_network


@dataclass(frozen=True, eq=False)
class JitterPosterior(bb.Posterior):
    kind: ClassVar[str] = "jitter"
    network: Network
    scale: float

    def draw(self, seed, index):
        random = torch.Generator().manual_seed(1_000_003 * seed + index)
        weights = {name: p.detach() for name, p in self.network.module.named_parameters() if p.ndim > 1}
        noisy = {n: w * (1 + self.scale * torch.randn(w.shape, generator=random).to(w)) for n, w in weights.items()}
        return partial(self.network, tensors=noisy)


def jitter(model, batches=None, *, scale=0.1):
    return JitterPosterior(as_network(model), scale)


bb.register(jitter, JitterPosterior, label="Jitter", about="Gaussian noise in all weight matrices")
