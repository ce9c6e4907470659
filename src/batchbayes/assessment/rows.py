"""The rows of predictions.csv: the same columns in an assessment and in `batchbayes predict`.

All columns come from the recommended method.

- `source` and `row`: the data set, and the number of the example in it. `id`: its name, if the source has names.
- `target`, or `accuracy` and `error_rate` of an image: the truth. Empty if no targets are known.
- Classes: `prediction`, its `confidence`, the `entropy` of all probabilities (nats).
- Images: means over all pixels of `confidence` and `entropy`.
- Values: `mean`, `std` of the whole prediction, and `lower` and `upper`, the ends of the conformal 90 % interval.
- How far the draws differ: `std` of the probability of the predicted class, `mutual_information` (nats), and for
  values `epistemic_std`. **Empty** if the recommended method makes no draws: then nothing is known about this.
- `flag`: 1 if the uncertainty is above the threshold of the assessment, else 0. The uncertainty is the `entropy`, and
  for values the `epistemic_std`. A method that gives all values the same spread flags none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchbayes.assessment.load import Case
from batchbayes.calibrate import ConformalIntervals
from batchbayes.data.examples import Examples
from batchbayes.likelihoods import categorical, gaussian
from batchbayes.posterior import Posterior
from batchbayes.prediction import predict, predict_stream
from batchbayes.predictive import CategoricalPredictive, GaussianPredictive

Rows = dict[str, list[Any]]
"""Rows, kept as columns by name."""
CONFORMAL_LEVEL = 0.9
TRUTH = {"classification": ["target"], "regression": ["target"], "segmentation": ["accuracy", "error_rate"]}
"""Columns that are known only with targets."""


def predict_rows(posterior: Posterior, data: Examples, notes: Mapping[str, Any], source: str) -> Rows:
    """Predict all examples of a source, as the notes of an assessment say."""
    drawing = {"num_samples": notes["draws"], "seed": notes["seed"], "engine": notes["engine"]}
    if notes["task"] == "classification":
        seen = predict(posterior, data, categorical(temperature=notes["temperature"]), **drawing)
        columns = _class_columns(seen, notes["class_names"])
    elif notes["task"] == "regression":
        seen = predict(posterior, data, gaussian(notes["precision"]), keep_draws=False, **drawing)
        columns = _value_columns(seen, notes["conformal_width"])
    else:
        likelihoods = [categorical(temperature=notes["temperature"])]
        stream = predict_stream(posterior, single_images(data), likelihoods, **drawing)
        columns = image_columns([image_cells(predicted.predictives[0]) for predicted in stream])
    return as_rows(columns, notes, source, data.ids())


def assessed_rows(posterior: Posterior, case: Case, notes: Mapping[str, Any], targets: Sequence[object]) -> Rows:
    """Predict the test data and the strange data of an assessment, with exactly the numbers of `batchbayes predict`.

    The last digits of a prediction can depend on the batch that an example is in. So the whole test data is predicted,
    in the batches of its source, even if a part of it was split off for calibration.
    """
    whole = predict_rows(posterior, replace(case.test, part=None), notes, "test")
    kept = case.test.rows().tolist()
    rows = {key: [column[i] for i in kept] for key, column in whole.items()} | {"target": list(targets)}
    if case.ood is None:
        return rows
    strange = predict_rows(posterior, case.ood, notes, "ood")
    empty = {"id": [""] * len(rows["row"])}, {"id": [""] * len(strange["row"])}
    keys = rows if "id" in rows else strange
    return {key: (empty[0] | rows)[key] + (empty[1] | strange)[key] for key in keys}


def as_rows(columns: Rows, notes: Mapping[str, Any], source: str, ids: Sequence[str] | None) -> Rows:
    """Add source, row, ids if there are any, empty cells for the truth, and flags, from the column "uncertainty"."""
    uncertainty = columns.pop("uncertainty")
    count = len(uncertainty)
    return {
        "source": [source] * count,
        "row": list(range(count)),
        **({} if ids is None else {"id": list(ids)}),
        **{key: [""] * count for key in TRUTH[notes["task"]]},
        **columns,
        "flag": [int(value > notes["threshold"]) for value in uncertainty],
    }


def _class_columns(seen: CategoricalPredictive, names: Sequence[str] | None) -> Rows:
    predicted = seen.log_probs.argmax(-1)
    std = seen.epistemic_variance.gather(-1, predicted.unsqueeze(-1)).squeeze(-1).sqrt()
    return {
        "prediction": class_labels(predicted, names),
        "confidence": rounded(seen.probs.amax(-1)),
        "std": _if_drawn(seen, std),
        "entropy": rounded(seen.entropy),
        "mutual_information": _if_drawn(seen, seen.mutual_information),
        "uncertainty": seen.entropy.tolist(),
    }


def _value_columns(seen: GaussianPredictive, conformal_width: float) -> Rows:
    """Return mean, spread and a conformal interval. If there are several outputs, the columns are of the first."""
    lower, upper = ConformalIntervals(CONFORMAL_LEVEL, conformal_width)(seen)
    return {
        "mean": rounded(first_output(seen.mean)),
        "std": rounded(first_output(seen.std)),
        "epistemic_std": _if_drawn(seen, spread_of_draws(seen)),
        "lower": rounded(first_output(lower)),
        "upper": rounded(first_output(upper)),
        "uncertainty": spread_of_draws(seen).tolist(),
    }


def single_images(data: Examples) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield batches of one image, so that memory does not grow with the batch size."""
    for inputs, labels in data:
        for i in range(len(inputs)):
            yield inputs[i : i + 1], None if labels is None else labels[i : i + 1]


def image_cells(seen: CategoricalPredictive) -> dict[str, Any]:
    """Return what predictions.csv says about a batch of one image: means over all its pixels."""
    information = float(seen.mutual_information.double().mean()) if seen.num_samples > 1 else ""
    entropy = float(seen.entropy.double().mean())
    confidence = float(seen.log_probs.amax(-1).exp().double().mean())
    return {"confidence": confidence, "entropy": entropy, "mutual_information": information, "uncertainty": entropy}


def image_columns(cells: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the cells of several images as columns."""
    return {key: [each[key] for each in cells] for key in cells[0]}


def spread_of_draws(seen: GaussianPredictive) -> Tensor:
    """Return the standard deviation over draws of the first output, (N,)."""
    return first_output(seen.epistemic_variance).sqrt()


def first_output(values: Tensor) -> Tensor:
    """Return the first output of each example, (N,)."""
    return values.reshape(len(values), -1)[:, 0]


def class_labels(labels: Tensor, names: Sequence[str] | None) -> list[Any]:
    """Return the names of classes, or their numbers if they have no names."""
    return [int(k) if names is None else names[int(k)] for k in labels]


def rounded(values: Tensor) -> list[float]:
    """Round to seven digits, which is what float32 holds."""
    return [float(f"{value:.7g}") for value in torch.as_tensor(values).double().tolist()]


def _if_drawn(seen: CategoricalPredictive | GaussianPredictive, values: Tensor) -> list[Any]:
    return rounded(values) if seen.num_samples > 1 else [""] * len(values)
