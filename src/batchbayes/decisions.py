r"""What uncertainty is for: when to refuse an answer, which match to believe, and where a peak is.

Each function takes scores or draws of any posterior. `choose_to_label`, which examples to label next, is in the package
batchbayes-papers.

Reference: Geifman, El-Yaniv, "Selective Classification for Deep Neural Networks", NeurIPS 2017.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from batchbayes._common.checks import (
    Values,
    check_bool,
    check_finite,
    check_no_nan,
    check_not_empty,
    moved,
    real,
)
from batchbayes._common.signatures import Share, checked
from batchbayes.errors import BatchbayesError


def __getattr__(name: str) -> Any:
    """Find what lives in another package."""
    if name != "choose_to_label":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return moved("batchbayes_papers.samples.acquisition:choose_to_label")


@checked
def rejection_threshold(uncertainty: Values, wrong: Values, *, risk: Share, confidence: Share = 0.95) -> float | None:
    r"""Return the largest uncertainty at which an answer may be given, so that the promised risk holds.

    Among answers with an uncertainty up to the threshold, the share of wrong ones is at most `risk`. This holds with
    probability `confidence` over the choice of the held-out examples: for each of the candidate thresholds the number
    of errors is compared with the binomial bound of Clopper and Pearson, with
    $\delta = (1 - c) / \lceil\log_2 N\rceil$, because that many thresholds are tried.

    Args:
        uncertainty: of held-out examples (N,), such as `predictive.entropy`.
        wrong: whether the prediction of each was wrong, bool (N,).
        risk: the promised share of wrong answers among those that are given.
        confidence: how sure the promise is.

    Returns:
        The threshold, or None if no threshold keeps the promise.

    >>> uncertainty = torch.linspace(0, 1, 1000)
    >>> threshold = rejection_threshold(uncertainty, uncertainty > 0.8, risk=0.02)
    >>> 0.75 < threshold <= 0.82
    True
    """
    check_not_empty("uncertainty", uncertainty)
    check_finite("uncertainty", uncertainty)
    check_bool("wrong", wrong, "uncertainty", uncertainty)
    uncertainty, wrong = one_for_each(uncertainty), one_for_each(wrong)
    order = uncertainty.argsort()
    errors, levels = wrong[order].cumsum(0), uncertainty[order]
    accepted = torch.searchsorted(levels, levels, right=True)  # a threshold accepts all examples that are equal to it
    tries = max(1, math.ceil(math.log2(len(levels))))
    low, high, found = 1, len(levels), None
    for _ in range(tries):  # bisection over the number of accepted examples, as in the reference
        middle = (low + high) // 2
        count = int(accepted[middle - 1])
        if binomial_bound(int(errors[count - 1]), count, (1 - confidence) / tries) <= risk:
            found, low = float(levels[middle - 1]), count + 1
        else:
            high = middle - 1
        if low > high:
            break
    return found


def one_for_each(values: Tensor) -> Tensor:
    """Return values (N,) or (N, 1), as those of a network with one logit, as (N,)."""
    if values.numel() != len(values):
        raise BatchbayesError(
            expected="one number for each example", got=f"shape {tuple(values.shape)}", fix="reduce maps to one number"
        )
    return values.flatten()


def binomial_bound(errors: int, count: int, delta: float) -> float:
    r"""Return the upper bound of Clopper and Pearson on a rate: the p with $P(\mathrm{Bin}(n, p) \le k) = \delta$.

    >>> round(binomial_bound(0, 100, 0.05), 4)  # 1 - 0.05^(1/100)
    0.0295
    """
    if errors >= count:
        return 1.0
    number = torch.arange(errors + 1, dtype=torch.float64)
    n = torch.tensor(float(count), dtype=torch.float64)
    choose = torch.lgamma(n + 1) - torch.lgamma(number + 1) - torch.lgamma(n - number + 1)
    low, high = errors / count, 1 - 1e-12
    for _ in range(60):
        p = (low + high) / 2
        tail = (choose + number * math.log(p) + (n - number) * math.log1p(-p)).logsumexp(0)
        low, high = (p, high) if tail > math.log(delta) else (low, p)
    return high


class Matches(NamedTuple):
    """How alike embeddings are, over draws."""

    mean: Tensor
    """Mean cosine similarity of each query and each entry of the gallery, (N, G)."""
    std: Tensor
    """Standard deviation of the similarity, (N, G)."""
    share_nearest: Tensor
    """Share of the draws in which the entry is the nearest to the query, (N, G)."""


@checked
def matches(queries: Values, gallery: Values) -> Matches:
    """Compare embeddings under draws: queries (S, N, E) with a gallery (S, G, E) of the same draws.

    Both are `predictive.draws` of `predict(posterior, x, gaussian(1.0), keep_draws=True)` with one seed, so that one
    network embeds both. The largest share of a query says how sure its match is.

    >>> found = matches(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 2.0], [3.0, 0.0]]]))
    >>> found.mean, found.share_nearest
    (tensor([[0., 1.]]), tensor([[0., 1.]]))
    """
    check_no_nan("queries", queries)
    check_no_nan("gallery", gallery)
    if queries.ndim != 3 or gallery.ndim != 3 or queries.shape[::2] != gallery.shape[::2] or not gallery.numel():
        got = f"{tuple(queries.shape)} and {tuple(gallery.shape)}"
        raise BatchbayesError(
            "embeddings (S, N, E) and (S, G, E) of the same draws", got, "pass predictive.draws of both"
        )
    alike = normalize(real(queries), dim=-1) @ normalize(real(gallery), dim=-1).mT  # (S, N, G)
    nearest = one_hot(alike.argmax(-1), alike.shape[-1]).to(alike)
    return Matches(alike.mean(0), alike.std(0, correction=0), nearest.mean(0))


@checked
def peaks(heatmaps: Values) -> tuple[Tensor, Tensor]:
    """Return where the peaks of heatmaps lie, as (x, y), and how far they scatter over draws: (S, ..., H, W) ->
    mean (..., 2) and standard deviation (..., 2), in pixels.

    Heatmaps are `predictive.draws` of `predict(posterior, x, gaussian(1.0), keep_draws=True)`.

    >>> maps = torch.zeros(2, 1, 4, 4)
    >>> maps[0, 0, 1, 2] = maps[1, 0, 3, 2] = 1.0
    >>> peaks(maps)
    (tensor([[2., 2.]], dtype=torch.float64), tensor([[0., 1.]], dtype=torch.float64))
    """
    check_no_nan("heatmaps", heatmaps)
    if heatmaps.ndim < 3 or not heatmaps.numel():
        raise BatchbayesError("heatmaps (S, ..., H, W)", f"{tuple(heatmaps.shape)}", "pass predictive.draws")
    best, width = heatmaps.flatten(-2).argmax(-1), heatmaps.shape[-1]
    places = torch.stack([best % width, best // width], -1).double()
    return places.mean(0), places.std(0, correction=0)
