"""Wide fixed features of images: patches that occur often, and where in the image they are found.

They learn from images without labels (those of the first part, for example):

- Patches are brought to mean 0 and a similar contrast, and whitened. Clusters of them (k-means of directions) become
  filters.
- The answers of the filters, above a threshold, are averaged in each cell of a grid over the image.
- The principal components of these averages are the features, with a column of ones for the bias.

Reference: Coates, Lee, Ng, "An Analysis of Single-Layer Networks in Unsupervised Feature Learning", AISTATS 2011. There
the features are not reduced.
"""

import os
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from batchbayes import BatchbayesError
from batchbayes.tools import generator, require_finite, whole_number
from batchbayes_papers.online.parts import read_features, write_features

MOST_PIXELS, MOST_PATCHES, MOST_IMAGES = 500_000, 20_000, 5_000
"""Largest numbers of pixels in the images that patches are looked for in, of patches that become clusters, and of
images that the components come from."""
CHUNK_PIXELS = 100_000
LOGIT_STD = 5.0
"""With a prior precision of 1, the logits of an image have about this standard deviation before any data."""


@dataclass(frozen=True, eq=False)
class PatchFeatures:
    """Images (N, C, H, W) to features (N, P) in float64."""

    filters: Tensor
    """(C size size, F), whitening included."""
    offsets: Tensor
    """(F,)"""
    contrast: Tensor
    """What is added to the variance of a patch."""
    centre: Tensor
    """(F grid grid,)"""
    components: Tensor
    """(F grid grid, P - 1)"""
    size: int
    grid: int

    @property
    def num_features(self) -> int:
        """P, with the column of ones."""
        return self.components.shape[1] + 1

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return F.pad((self._averages(_checked(images)) - self.centre) @ self.components, (0, 1), value=1.0)

    def _averages(self, images: Tensor) -> Tensor:
        """Return the mean answer of each filter in each cell, (N, F grid grid)."""
        count = max(1, CHUNK_PIXELS // images[0, 0].numel())
        return torch.cat([self._averages_of_chunk(some) for some in images.split(count)])

    def _averages_of_chunk(self, images: Tensor) -> Tensor:
        patches = _normalised(_patches(images, self.size), self.contrast)  # (n, places, C size size)
        answers = (patches @ self.filters - self.offsets).relu().mT.unflatten(2, images.shape[2:])
        return F.adaptive_avg_pool2d(answers, self.grid).flatten(1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to a file, whole or not at all."""
        write_features(path, "patch features", vars(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote."""
        return cls(**read_features(path, "patch features"))


@torch.no_grad()
def patch_features(
    images: Tensor, num_features: int = 121, *, num_filters: int = 128, size: int = 5, grid: int = 4, seed: int = 0
) -> PatchFeatures:
    """Learn features from images (N, C, H, W), without labels.

    Args:
        images: of the first part, or any others of the same kind.
        num_features: with the column of ones; fewer if there are not as many images or averages.
        num_filters: kinds of patches.
        size: of a patch, an odd number of pixels.
        grid: the image is cut into grid x grid cells.
        seed: chooses patches and where the clusters start.

    >>> images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> features = patch_features(images, num_features=11, num_filters=16, size=3, grid=2)
    >>> features(images[:4]).shape
    torch.Size([4, 11])

    >>> import batchbayes as bb
    >>> from batchbayes_papers import online
    >>> state = online.OnlineLastLayer.start(2, features.num_features, bb.categorical(), num_draws=16)
    >>> state = state.update((features(images), torch.arange(20) % 2))
    """
    whole_number("num_features", num_features, least=2)
    whole_number("size", size)
    whole_number("grid", grid)
    images, random = _checked(images), generator(seed, "patches")
    if size % 2 == 0 or size // 2 >= min(images.shape[2:]) or grid > min(images.shape[2:]) or len(images) < 2:
        raise BatchbayesError(
            expected="two images or more, an odd size, and patches and a grid that fit the images",
            got=f"images of shape {tuple(images.shape)}, size {size} and grid {grid}",
            fix="choose a smaller size or grid",
        )
    patches = _patches(_some(images, max(2, MOST_PIXELS // images[0, 0].numel()), random), size).flatten(0, 1)
    spread = patches.var(1)
    rows = (spread > 0.0025 * spread.mean()).nonzero()[:, 0]  # flat patches have no direction
    if len(rows) < whole_number("num_filters", num_filters):
        raise BatchbayesError(
            expected=f"at least {num_filters} patches that are not flat, one for each filter",
            got=f"{len(rows)} in {len(images)} images",
            fix="pass more images, or a smaller num_filters",
        )
    contrast = 0.1 * spread.mean()
    some = _normalised(patches[rows[torch.randperm(len(rows), generator=random)[:MOST_PATCHES]]], contrast)
    values, vectors = torch.linalg.eigh(torch.cov(some.T))
    whitening = vectors * (values.clamp_min(0) + 0.1).rsqrt() @ vectors.T
    whitened = (some - some.mean(0)) @ whitening
    centres = _clusters(whitened, num_filters, random)
    filters = whitening @ centres.T
    offsets = some.mean(0) @ filters + (whitened @ centres.T).std()
    return _with_components(
        _some(images, MOST_IMAGES, random), filters, offsets, contrast, num_features - 1, size, grid
    )


def _with_components(
    images: Tensor, filters: Tensor, offsets: Tensor, contrast: Tensor, count: int, size: int, grid: int
) -> PatchFeatures:
    """Find the principal components of the averages, and give them a common scale."""
    bare = PatchFeatures(filters, offsets, contrast, filters.new_zeros(()), filters.new_zeros(()), size, grid)
    averages = bare._averages(images)
    centre = averages.mean(0)
    _, lengths, components = torch.linalg.svd(averages - centre, full_matrices=False)
    count = min(count, int((lengths > 1e-9 * lengths[0]).sum()))
    total_variance = lengths[:count].square().sum() / len(images)
    scaled = LOGIT_STD * components[:count].T / total_variance.sqrt()
    return PatchFeatures(filters, offsets, contrast, centre, scaled.contiguous(), size, grid)


def _checked(images: Tensor) -> Tensor:
    if images.ndim != 4 or not len(images):
        raise BatchbayesError(
            expected="images of shape (N, C, H, W), at least one",
            got=f"shape {tuple(images.shape)}",
            fix="reshape them; grey images have C = 1",
        )
    return require_finite(images, "the images").double()


def _some(images: Tensor, most: int, random: torch.Generator) -> Tensor:
    return images if len(images) <= most else images[torch.randperm(len(images), generator=random)[:most]]


def _patches(images: Tensor, size: int) -> Tensor:
    """Return the patch around each pixel, (N, H W, C size size). Beyond the border the image goes on as it ends."""
    wider = F.pad(images, (size // 2,) * 4, mode="replicate")
    return F.unfold(wider, size).mT


def _normalised(patches: Tensor, contrast: Tensor) -> Tensor:
    centred = patches - patches.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + contrast).rsqrt()


def _clusters(points: Tensor, count: int, random: torch.Generator, steps: int = 15) -> Tensor:
    """Return the directions (count, D) of clusters of points (N, D)."""
    points = F.normalize(points, dim=1)
    centres = points[torch.randperm(len(points), generator=random)[:count]]
    for _ in range(steps):
        nearest = (points @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(sums.norm(dim=1, keepdim=True) > 0, F.normalize(sums, dim=1), centres)
    return centres
