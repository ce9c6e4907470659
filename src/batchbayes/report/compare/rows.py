"""The rows of predictions.csv: the same columns in an assessment and in `batchbayes predict`.

All columns come from the recommended method.

- `source` and `row`: the data set, and the number of the example in it. `id`: its name, if the source has names.
- `target`, or `accuracy` and `error_rate` of an image: the truth. Empty if no targets are known.
- Classes: `prediction`, its `confidence`, the `entropy` of all probabilities (nats).
- Images: means over all pixels of `confidence` and `entropy`.
- Values: `mean`, `std` of the whole prediction, and `lower` and `upper`, the ends of the 90 % interval. A
  network with several outputs has `mean_2`, `std_2` and so on for the others.
- How far the draws differ: `std` of the probability of the predicted class, `mutual_information` (nats), and for
  values `epistemic_std`. **Empty** if the recommended method makes no draws: then nothing is known about this.
- `novelty`: the p-value of the input among ordinary ones. A small one says that the network has not seen such an input.
  Empty if this could not be measured, as for networks without batch norm.
- `flag`: 1 if the answer is uncertain or the input is novel, else 0, and `why`: which of the two. An answer is
  uncertain if its `entropy`, for values its `epistemic_std`, is above the threshold of the assessment. A method that
  gives all values the same spread calls none uncertain.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchbayes.calibrate import flag_limits
from batchbayes.novelty.detector import Novelty
from batchbayes.posterior import Posterior
from batchbayes.predict import Predicted, predict, predict_stream
from batchbayes.predictive import CategoricalPredictive, GaussianPredictive
from batchbayes.report.compare.intervals import Intervals
from batchbayes.report.read.case import Case
from batchbayes.report.read.examples import Examples
from batchbayes.report.read.likelihood import noted_likelihood

Rows = dict[str, list[Any]]
"""Rows, kept as columns by name."""
Show = Callable[[str, CategoricalPredictive], None]
"""Takes the name of an image and its predictive (1, H, W), for example to write maps of it."""
WHY = {
    (False, False): "",
    (True, False): "uncertain",
    (False, True): "novel",
    (True, True): "uncertain and novel",
}
"""Why a row is flagged, by whether its answer is uncertain and whether its input is novel."""


def predict_rows(
    posterior: Posterior,
    data: Examples,
    notes: Mapping[str, Any],
    source: str,
    novelty: Novelty | None = None,
    show: Show | None = None,
) -> Rows:
    """Predict all examples of a source, as the notes of an assessment say."""
    drawing = {"num_samples": notes["draws"], "seed": notes["seed"], "engine": notes["engine"]}
    ids, likelihood = data.ids(), noted_likelihood(notes)
    if notes["task"] == "segmentation":
        columns = _image_columns(
            predict_stream(posterior, data.one_by_one(), [likelihood], **drawing), notes, ids, show
        )
    else:
        seen: Any = predict(posterior, data, likelihood, keep_draws=False, **drawing)
        columns = (_value_columns if notes["task"] == "regression" else _class_columns)(seen, notes)
    uncertain = columns.pop("uncertain")
    p_values = None if novelty is None else novelty.p_value(data, whole=False)
    novel = [False] * len(uncertain) if p_values is None else (p_values <= notes["novelty_level"]).tolist()
    empty = [""] * len(uncertain)
    return {
        "source": [source] * len(uncertain),
        "row": list(range(len(uncertain))),
        **({} if ids is None else {"id": list(ids)}),
        **dict.fromkeys(truth_columns(notes), empty),
        **columns,
        "novelty": empty if p_values is None else rounded(p_values),
        "flag": [int(a or b) for a, b in zip(uncertain, novel, strict=True)],
        "why": [WHY[a, b] for a, b in zip(uncertain, novel, strict=True)],
    }


def assessed_rows(
    case: Case,
    posterior: Posterior,
    notes: Mapping[str, Any],
    truth: Rows,
    novelty: Novelty | None,
    show: Show | None = None,
) -> Rows:
    """Predict the test data and the strange data of an assessment, with exactly the numbers of `batchbayes predict`.

    The last digits of a prediction can depend on the batch that an example is in. So the whole test data is predicted,
    in the batches of its source, even if a part of it was split off for calibration. Images are predicted one by one.
    """
    is_split = case.split_off and case.task != "segmentation"
    tested = predict_rows(posterior, case.test.whole() if is_split else case.test, notes, "test", novelty, show)
    kept = case.test.rows().tolist()
    if is_split:
        tested = {key: [column[i] for i in kept] for key, column in tested.items()}
    rows = tested | {"row": kept} | truth
    if case.ood is None:
        return rows
    strange = predict_rows(posterior, case.ood, notes, "ood", novelty)
    keys = rows if "id" in rows else strange
    parts = [{"id": [""] * len(part["row"])} | part for part in (rows, strange)]
    return {key: parts[0][key] + parts[1][key] for key in keys}


def truth_columns(notes: Mapping[str, Any]) -> list[str]:
    """Return the columns that are known only with targets."""
    if notes["task"] == "segmentation":
        return ["accuracy", "error_rate"]
    return [f"target{suffix(i)}" for i in range(notes.get("outputs", 1))]


def suffix(output: int) -> str:
    """Return what is added to the names of columns of an output, by its number from 0.

    >>> [f"mean{suffix(i)}" for i in range(3)]
    ['mean', 'mean_2', 'mean_3']
    """
    return f"_{output + 1}" if output else ""


def _class_columns(seen: CategoricalPredictive, notes: Mapping[str, Any]) -> Rows:
    predicted = seen.log_probs.argmax(-1)
    std = seen.epistemic_variance.gather(-1, predicted.unsqueeze(-1)).squeeze(-1).sqrt()
    return {
        "prediction": class_labels(predicted, notes["class_names"]),
        "confidence": rounded(seen.probs.amax(-1)),
        "std": _if_drawn(seen, std),
        "entropy": rounded(seen.entropy),
        "mutual_information": _if_drawn(seen, seen.mutual_information),
        "uncertain": (seen.entropy.double() > _limits(notes)).tolist(),
    }


def _value_columns(seen: GaussianPredictive, notes: Mapping[str, Any]) -> Rows:
    """Return mean, spread and a conformal interval of each output."""
    found: Rows = {}
    mean, std, spread = (outputs_of(values) for values in (seen.mean, seen.std, seen.epistemic_variance.sqrt()))
    lower, upper = map(outputs_of, Intervals.from_notes(notes).ends(seen.mean, seen.std))
    for i in range(mean.shape[1]):
        found |= {
            f"mean{suffix(i)}": rounded(mean[:, i]),
            f"std{suffix(i)}": rounded(std[:, i]),
            f"epistemic_std{suffix(i)}": _if_drawn(seen, spread[:, i]),
            f"lower{suffix(i)}": rounded(lower[:, i]),
            f"upper{suffix(i)}": rounded(upper[:, i]),
        }
    return found | {"uncertain": (spread.double() > _limits(notes)).any(1).tolist()}


def _limits(notes: Mapping[str, Any]) -> Tensor:
    return flag_limits(notes["threshold"], in_nats=notes["task"] != "regression")


def _image_columns(
    stream: Iterable[Predicted], notes: Mapping[str, Any], ids: Sequence[str] | None, show: Show | None
) -> Rows:
    """Return means over all pixels of images that are predicted one by one, so that memory does not grow."""
    cells = []
    for i, predicted in enumerate(stream):
        seen = predicted.predictives[0]
        cells.append(image_cells(seen))
        if show is not None:
            show(ids[i] if ids else f"{i:05}", seen)
    columns = {key: [each[key] for each in cells] for key in cells[0]}
    return columns | {"uncertain": [entropy > float(_limits(notes)) for entropy in columns["entropy"]]}


def image_cells(seen: CategoricalPredictive) -> dict[str, Any]:
    """Return what predictions.csv says about a batch of one image: means over all its pixels."""
    information = float(seen.mutual_information.double().mean()) if seen.num_samples > 1 else ""
    entropy = float(seen.entropy.double().mean())
    confidence = float(seen.log_probs.amax(-1).exp().double().mean())
    return {"confidence": confidence, "entropy": entropy, "mutual_information": information}


def outputs_of(values: Tensor) -> Tensor:
    """Return the outputs of each example in one row, (N, D)."""
    return values.reshape(len(values), -1)


def first_output(values: Tensor) -> Tensor:
    """Return the first output of each example, (N,)."""
    return outputs_of(values)[:, 0]


def class_labels(labels: Tensor, names: Sequence[str] | None) -> list[Any]:
    """Return the names of classes, or their numbers if they have no names."""
    return [int(k) if names is None else names[int(k)] for k in labels]


def rounded(values: Tensor) -> list[float]:
    """Round to the digits that the numbers have: seven of float32, fifteen of float64."""
    digits = 15 if (values := torch.as_tensor(values)).dtype == torch.float64 else 7
    return [float(f"{value:.{digits}g}") for value in values.double().tolist()]


def _if_drawn(seen: CategoricalPredictive | GaussianPredictive, values: Tensor) -> list[Any]:
    return rounded(values) if seen.num_samples > 1 else [""] * len(values)
