"""Where in an image does a network see what it did not see in training?

At some batch-norm sites the channels of each position are a vector. Its Mahalanobis distance from the vectors of the
training images is large where the image is unusual. The logarithms of the distances are standardised by those of
training, scaled to the size of the image, and averaged over the sites. One forward pass makes the map.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchbayes.tools import Network, as_network

SHRINKAGE = 0.1
"""The share of the identity in the covariance of standardised channels."""


@dataclass(frozen=True, eq=False)
class PlaceModel:
    """What is usual at one site: mean (C,), whitening matrix (C, C), and the moments of the log distance."""

    mean: Tensor
    whitening: Tensor
    log_mean: float = 0.0
    log_std: float = 1.0

    def log_distance(self, h: Tensor) -> Tensor:
        """Return the log of the mean square of whitened channels (n, C, H, W), (n, H, W)."""
        centred = h.movedim(1, -1) - self.mean
        return ((centred @ self.whitening).square().mean(-1) + 1e-6).log()


@dataclass(frozen=True, eq=False)
class NoveltyMap:
    """A fitted detector of unusual places."""

    network: Network
    places: dict[str, PlaceModel]

    def __call__(self, images: Tensor) -> Tensor:
        """Return how unusual each pixel of images (n, C, H, W) is, (n, H, W): in training about 0 on average."""
        total = torch.zeros(len(images), *images.shape[-2:])
        for name, h in features(self.network, images, list(self.places)).items():
            place = self.places[name]
            z = (place.log_distance(h) - place.log_mean) / place.log_std
            total += F.interpolate(z[:, None], images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]
        return total / len(self.places)


@torch.no_grad()
def features(network: Network, images: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the inputs of batch-norm layers in one forward pass, by the names of the layers."""
    seen: dict[str, Tensor] = {}

    def see(name: str, h: Tensor) -> None:
        seen[name] = h.detach().float()

    network(images, before={name: partial(see, name) for name in names})
    return seen


def fit_novelty_map(model: nn.Module, images: Callable[[], Iterable[Tensor]], names: Sequence[str]) -> NoveltyMap:
    """Fit to training images, which are read twice: first for the covariances, then for the distances."""
    network = as_network(model)
    sums: dict[str, list[Tensor]] = {}
    for batch in images():
        for name, h in features(network, batch, names).items():
            rows = h.movedim(1, -1).flatten(0, -2).double()
            own = [torch.tensor(len(rows)).double(), rows.sum(0), rows.T @ rows]
            sums[name] = [a + b for a, b in zip(sums[name], own, strict=True)] if name in sums else own
    models = {name: _usual(*sums[name]) for name in names}
    logs: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch in images():
        for name, h in features(network, batch, names).items():
            found = models[name].log_distance(h).double()
            logs[name].append(torch.stack([found.mean(), found.square().mean()]))
    places = {}
    for name, own in models.items():
        mean, square = torch.stack(logs[name]).mean(0)
        std = float((square - mean.square()).clamp_min(1e-12).sqrt())
        places[name] = PlaceModel(own.mean, own.whitening, float(mean), std)
    return NoveltyMap(network, places)


def _usual(count: Tensor, total: Tensor, squares: Tensor) -> PlaceModel:
    """Return mean and whitening from sums over all positions."""
    mean = total / count
    covariance = squares / count - mean[:, None] * mean
    std = covariance.diagonal().clamp_min(1e-12).sqrt()
    correlation = covariance / (std[:, None] * std)
    mixed = (1 - SHRINKAGE) * correlation + SHRINKAGE * torch.eye(len(mean), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(mixed)
    whitening = vectors * values.clamp_min(1e-6).rsqrt() / std[:, None]
    return PlaceModel(mean.float(), whitening.float())
