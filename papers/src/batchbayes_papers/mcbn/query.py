"""Three ways to predict a test image together with training images: does it matter which one is used?

The MCBN paper draws M - 1 training images anew for each test image and each pass, and takes the statistics of these
alone. Here each pass draws a batch once, for all test images. The predictive of one image is the same in law, and this
is tested: for each image, the mean of its log-likelihood over fresh batches is compared with that over shared ones. The
predictive of Atanov et al. (2018) also counts the test image in the statistics.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.tools import summarised
from batchbayes_papers.data.cifar10 import augmented_batches
from batchbayes_papers.runner.tables import CellValue, ResultTable

SHARED, FRESH, INSIDE = "outside, shared batches", "outside, fresh batches for each image", "inside, shared companions"
SHARED_TIMES = 4
"""The number of shared draws for each fresh one. Their means are better known, then."""


def query_rows(
    network: nn.Module, train: Tensor, test: tuple[Tensor, Tensor], batch_size: int, passes: int
) -> dict[str, Any]:
    """Score the three ways with M - 1 companions, and compare fresh with shared batches image by image."""
    images, labels = test
    companions = batch_size - 1

    def fitted(seed: int, count: int) -> bb.BatchNormPosterior:
        return bb.mcbn(network, augmented_batches(train, companions, seed=seed), num_samples=count, center="batches")

    many = SHARED_TIMES * passes
    shared = _logits(fitted(1, many), images, many)
    fresh = fresh_logits(fitted(2, passes * len(images)), images)
    inside = bb.mcbn(network, augmented_batches(train, batch_size, seed=3), num_samples=passes, include_query=True)
    found = {SHARED: shared[:passes], FRESH: fresh, INSIDE: _logits(inside, images, passes)}
    ways = {name: _scores(draws, labels) for name, draws in found.items()}
    return {"ways": ways, "passes": passes, **same_marginals(fresh, shared, labels)}


def fresh_logits(posterior: bb.BatchNormPosterior, images: Tensor) -> Tensor:
    """Return logits (T, N, K) in which no two images share a batch: the posterior has T N rows."""
    rows = posterior.deviations.unflatten(0, (len(images), -1))  # (N, T, D)
    with torch.no_grad():
        each = [
            torch.stack([posterior.function(posterior.center + row)(image[None])[0] for row in own])
            for image, own in zip(images, rows, strict=True)
        ]
    return torch.stack(each, 1)


def _logits(posterior: Any, images: Tensor, count: int) -> Tensor:
    return bb.predict(posterior, images, bb.categorical(), num_samples=count, keep_draws=True).draws


def _scores(draws: Tensor, labels: Tensor) -> dict[str, float]:
    seen = summarised(bb.categorical().summary(), draws, keep=False)
    each = seen.log_prob(labels).double()
    return {
        "pll": float(each.mean()),
        "error": float(each.std() / len(each) ** 0.5),
        "information": float(seen.mutual_information.double().mean()),
    }


def same_marginals(fresh: Tensor, shared: Tensor, labels: Tensor) -> dict[str, float]:
    """Compare the log-likelihoods of single draws (S, N, K), image by image.

    If both have the same law, the differences of their means in standard errors have mean 0 and variance 1, and the
    ratio of their variances is 1.
    """
    one, other = (draws.double().log_softmax(-1) for draws in (fresh, shared))
    one, other = (each.gather(-1, labels.expand(len(each), -1)[..., None])[..., 0] for each in (one, other))  # (S, N)
    error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
    z = (one.mean(0) - other.mean(0)) / error.clamp_min(1e-12)
    ratio = (one.var(0).clamp_min(1e-24) / other.var(0).clamp_min(1e-24)).log().median()
    return {
        "mean_z": float(z.mean()),
        "std_z": float(z.std()),
        "outside_two": float((z.abs() > 1.96).double().mean()),
        "variance_ratio": float(ratio.exp()),
    }


def query_table(result: Mapping[str, Any] | None) -> ResultTable:
    """Return the scores of the three ways, and in notes whether fresh and shared batches agree."""
    rows: list[tuple[CellValue, ...]] = []
    notes: tuple[str, ...] = ()
    if result:
        rows = [
            (name, result["passes"], own["pll"], own["error"], own["information"])
            for name in (SHARED, FRESH, INSIDE)
            for own in (result["ways"][name],)
        ]
        notes = (
            f"Fresh less shared batches, image by image, in standard errors: mean {result['mean_z']:+.2f}, standard "
            f"deviation {result['std_z']:.2f}, beyond 1.96 in {result['outside_two']:.0%} of images. The median ratio "
            f"of variances over draws is {result['variance_ratio']:.2f}. If the laws are the same, these are near 0, "
            "1, 5 % and 1.",
        )
    return ResultTable(
        "The test image and its batch, network trained here",
        ("test image", "passes", "log-likelihood", "standard error", "mutual information"),
        tuple(rows),
        ("", "", ".3f", ".3f", ".4f"),
        notes,
    )
