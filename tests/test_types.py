"""What a user's type checker has to accept. Pyright reads this file; the numbers are checked elsewhere."""

import numpy as np
import torch
from torch import nn

import batchbayes as bb
from batchbayes import calibrate, metrics


def test_labels_and_scores_may_be_arrays_and_lists():
    posterior = bb.deterministic(nn.Identity())
    answer = bb.predict(posterior, 2 * torch.eye(3), bb.categorical(), keep_draws=True)
    values = bb.predict(posterior, torch.eye(3), bb.gaussian([1.0, 2.0, 3.0]))
    labels, targets = np.array([0, 1, 1]), np.zeros((3, 3))
    assert answer.log_prob(labels).shape == answer.log_prob([0, 1, 1]).shape == (3,)
    assert values.log_prob(targets).shape == values.crps(targets).shape == values.cdf(targets).shape == (3, 3)
    assert metrics.evaluate(answer, labels)["accuracy"] == metrics.accuracy(answer.probs.numpy(), labels)
    assert metrics.area_under_roc([0.1, 0.2], [False, True]) == 1.0
    assert metrics.brier([[0.25, 0.75]], [0]).tolist() == [1.125]
    assert calibrate.tune_temperature(answer, labels) > 0
    assert calibrate.conformal_sets(answer, labels).level == calibrate.conformal_intervals(values, targets).level
    precisions: tuple[float, ...] = calibrate.tune_precision(values, targets, per_output=True)
    assert len(precisions) == 3
