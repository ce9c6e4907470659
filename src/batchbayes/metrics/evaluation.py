"""The usual metrics of a prediction in one call. An assessment has the same numbers by the same names."""

import math

import torch
from torch import Tensor

from batchbayes._common.checks import Values, as_tensor, fitting_yes_or_no, shaped_like
from batchbayes.errors import BatchbayesError
from batchbayes.metrics.classification import accuracy, brier, expected_calibration_error, is_misclassified
from batchbayes.metrics.ranking import area_under_roc
from batchbayes.metrics.regression import interval_summary, root_mean_squared_error
from batchbayes.metrics.summary import mean_score, negative_log_likelihood
from batchbayes.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive, Predictive

INTERVAL = 0.9


def evaluate(predictive: Predictive, targets: Values) -> dict[str, float]:
    """Return the usual metrics of a prediction, by name. All elements of the targets count alike.

    Classes, yes or no, pixels:

    - `nll`: the negative log-likelihood in nats, infinite if a true class has probability zero;
    - `accuracy`: the share of right answers;
    - `brier`: the sum over classes of squared errors, from 0 to 2, also for yes or no;
    - `ece`: the expected calibration error, with 15 bins of equal width;
    - `mean_entropy`, `mean_mutual_information`: the total and the epistemic uncertainty, in nats;
    - `error_auroc`: how well entropy tells wrong answers from right ones, NaN if all are right or all are wrong.

    Real values:

    - `nll`: the negative log-density of the mixture over draws, the mean over all outputs, each by itself;
    - `joint_nll`: if there are several outputs, the negative log-density of all outputs of an example together, the
      mean over examples;
    - `rmse`, `crps`: the root of the mean squared error, and the CRPS of the mixture, in the unit of the target;
    - `coverage_90`, `width_90`: the share of targets in the central 90 % intervals, and the mean width of these.

    Args:
        predictive: what `bb.predict` returned. For real values it must have kept its draws, as it does by default.
        targets: the truth, in the shape that `predictive.log_prob` takes. Labels of the likelihood's `ignore_index` do
            not count.

    >>> import batchbayes as bb
    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.5, 0.0]])
    >>> answer = bb.predict(bb.deterministic(torch.nn.Identity()), logits, bb.categorical())
    >>> found = evaluate(answer, torch.tensor([0, 1, 1]))
    >>> [f"{name} {value:.3f}" for name, value in found.items()][:4]
    ['nll 0.409', 'accuracy 0.667', 'brier 0.277', 'ece 0.287']
    """
    if isinstance(predictive, GaussianPredictive):
        return _of_values(predictive, targets)
    if isinstance(predictive, CategoricalPredictive | BernoulliPredictive):
        return _of_classes(predictive, targets)
    raise BatchbayesError(
        expected="a predictive, and then its targets",
        got=f"a {type(predictive).__name__} as the first argument",
        fix="pass what bb.predict returned; for tensors of probabilities call the metrics one by one",
    )


def _of_classes(predictive: CategoricalPredictive | BernoulliPredictive, targets: Tensor) -> dict[str, float]:
    nll = negative_log_likelihood(predictive.log_prob(targets))  # this also checks the targets
    ignored = getattr(predictive.likelihood, "ignore_index", None)
    if isinstance(predictive, BernoulliPredictive):
        log_probs, labels = predictive.class_log_probs, fitting_yes_or_no(targets, predictive.entropy.shape)
    else:
        log_probs, labels = predictive.log_probs, as_tensor(targets).cpu()
    counts = torch.ones_like(labels, dtype=torch.bool) if ignored is None else labels != ignored
    probs, labels, entropy = log_probs.exp()[counts], labels[counts].long(), predictive.entropy[counts]  # (n, K), (n,)
    wrong = is_misclassified(probs, labels)
    return {
        "nll": nll,
        "accuracy": accuracy(probs, labels),
        "brier": mean_score(brier(probs, labels)),
        "ece": expected_calibration_error(probs, labels),
        "mean_entropy": mean_score(entropy),
        "mean_mutual_information": mean_score(predictive.mutual_information[counts]),
        "error_auroc": area_under_roc(entropy, wrong) if wrong.any() and not wrong.all() else math.nan,
    }


def _of_values(predictive: GaussianPredictive, targets: Tensor) -> dict[str, float]:
    shaped = shaped_like(targets, predictive.mean.shape)
    held = interval_summary(*predictive.interval(INTERVAL), shaped)
    several = shaped[:1].numel() > 1
    return {
        "nll": negative_log_likelihood(predictive.log_prob(shaped)),
        **({"joint_nll": negative_log_likelihood(predictive.joint_log_prob(shaped))} if several else {}),
        "rmse": root_mean_squared_error(predictive.mean, shaped),
        "crps": mean_score(predictive.crps(shaped)),
        "coverage_90": held.coverage,
        "width_90": held.mean_width,
    }
