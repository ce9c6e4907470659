"""A researcher: a method of her own beside the others, on equal terms, with scores and their errors.

python -m examples.users.research FOLDER
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

import batchbayes as bb
from batchbayes.tools import Network, as_network
from examples.users.shapes import draw, scaled, train


@dataclass(frozen=True, eq=False)
class HeadNoisePosterior(bb.Posterior):
    """Gaussian noise in the last weight matrix."""

    kind: ClassVar[str] = "head-noise"
    network: Network
    scale: float

    def draw(self, seed: int, index: int):
        name, weight = [(n, p.detach()) for n, p in self.network.module.named_parameters() if p.ndim == 2][-1]
        random = torch.Generator().manual_seed(1_000_003 * seed + index)
        return partial(self.network, tensors={name: weight + self.scale * torch.randn(weight.shape, generator=random)})

    def state(self):
        return {"output": self.network.output, "scale": self.scale}, {}

    @classmethod
    def restore(cls, header, tensors, model):
        return cls(as_network(model, header["output"]), header["scale"])


def head_noise(model, batches=None, *, scale: float = 0.2) -> HeadNoisePosterior:
    return HeadNoisePosterior(as_network(model), scale)


bb.register(head_noise, HeadNoisePosterior, label="Head noise", about="Gaussian noise in the last weight matrix")


def small_network() -> torch.nn.Module:
    blocks = [torch.nn.Conv2d(3, 16, 3, stride=2), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
    return torch.nn.Sequential(*blocks, torch.nn.AdaptiveAvgPool2d(3), torch.nn.Flatten(), torch.nn.Linear(144, 3))


def main(folder: Path) -> None:
    images, labels, _ = draw(600, 0)
    torch.manual_seed(0)
    network = train(small_network(), scaled(images), labels, steps=150)
    inputs, targets = (lambda drawn: (scaled(drawn[0]), drawn[1]))(draw(400, 1))
    posteriors = {
        "network": bb.deterministic(network),
        "MCBN": bb.mcbn(network, scaled(images), batch_size=32, num_samples=16),
        "correlated BN": bb.correlated_bn(network, scaled(images), batch_size=32, num_samples=16),
        "MC dropout": bb.mc_dropout(network),
        "head noise": bb.head_noise(network),
    }
    print("method          NLL +- error  accuracy")
    for name, posterior in posteriors.items():
        seen = bb.predict(posterior, inputs, bb.categorical(), num_samples=16, seed=1)
        nll = -seen.log_prob(targets)
        naive = torch.stack([posterior.draw(1, s)(inputs).softmax(1) for s in range(seen.num_samples)]).mean(0)
        torch.testing.assert_close(seen.probs, naive.detach(), rtol=1e-4, atol=1e-5)
        accuracy = bb.metrics.accuracy(seen.probs, targets)
        print(f"{name:15} {nll.mean():.3f} +- {nll.std() / len(nll) ** 0.5:.3f}  {accuracy:.1%}")
        assert accuracy > 0.5
    bb.save(posteriors["head noise"], folder / "own.safetensors")
    assert bb.load(folder / "own.safetensors", network).scale == posteriors["head noise"].scale
    found = bb.assess(
        network, scaled(images), (inputs, targets), batch_size=32, draws=8, method=("mcbn", "head-noise"), views="none"
    )
    assert "Head noise" in " ".join(found.metrics), found.metrics.keys()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
