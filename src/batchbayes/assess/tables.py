"""The rows of predictions.csv: the same columns in an assessment and in `batchbayes predict`.

The answer and its uncertainty (`prediction`, `confidence` or `mean`, `entropy`, `std` of a regression) are those of the
recommended method. What draws disagree about (`mutual_information`, `epistemic_std`, `std` of a class probability)
always comes from the posterior. `flag` goes by the entropy of a class, and by the `epistemic_std` of a value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchbayes.predictive import CategoricalPredictive, GaussianPredictive

Table = dict[str, list[object]]


def class_table(
    answer: CategoricalPredictive,
    drawn: CategoricalPredictive,
    *,
    source: str,
    rows: Tensor,
    labels: Tensor | None,
    names: Sequence[str] | None,
    threshold: float | None,
) -> Table:
    """One row an example: what class, how sure, and whether to look again."""
    predicted = answer.log_probs.argmax(-1)
    std = drawn.epistemic_variance.gather(-1, predicted.unsqueeze(-1)).squeeze(-1).sqrt()
    return {
        "source": [source] * len(rows),
        "row": rows.tolist(),
        "target": [""] * len(rows) if labels is None else _named(labels, names),
        "prediction": _named(predicted, names),
        "confidence": _rounded(answer.probs.amax(-1)),
        "std": _rounded(std),
        "entropy": _rounded(answer.entropy),
        "mutual_information": _rounded(drawn.mutual_information),
        "flag": flags(answer.entropy, threshold),
    }


def value_table(
    answer: GaussianPredictive,
    drawn: GaussianPredictive,
    *,
    source: str,
    rows: Tensor,
    targets: Tensor | None,
    threshold: float | None,
    intervals: tuple[Tensor, Tensor],
) -> Table:
    """One row an example: mean, spread, a conformal interval, and whether to look again. Several outputs: the first."""
    first = (slice(None), *(0 for _ in range(answer.mean.ndim - 1)))
    return {
        "source": [source] * len(rows),
        "row": rows.tolist(),
        "target": [""] * len(rows) if targets is None else _rounded(targets.reshape(answer.mean.shape)[first]),
        "mean": _rounded(answer.mean[first]),
        "std": _rounded(answer.std[first]),
        "epistemic_std": _rounded(drawn.epistemic_variance.sqrt()[first]),
        "lower": _rounded(intervals[0][first]),
        "upper": _rounded(intervals[1][first]),
        "flag": flags(drawn.epistemic_variance.sqrt()[first], threshold),
    }


def flags(uncertainty: Tensor, threshold: float | None) -> list[object]:
    """1 where the uncertainty is above the threshold."""
    if threshold is None:
        return [""] * len(uncertainty)
    return (uncertainty > threshold).long().tolist()


def joined(first: Table, second: Table) -> Table:
    """The rows of one table under those of another."""
    return {key: first[key] + second[key] for key in first}


def _named(labels: Tensor, names: Sequence[str] | None) -> list[object]:
    return [int(k) if names is None else names[int(k)] for k in labels]


def _rounded(values: Tensor) -> list[object]:
    """Seven digits: what float32 holds."""
    return [float(f"{value:.7g}") for value in torch.as_tensor(values).double().tolist()]
