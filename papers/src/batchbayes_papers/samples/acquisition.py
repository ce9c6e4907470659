r"""Which examples to label next: by single scores, or jointly.

References: Houlsby et al., "Bayesian Active Learning for Classification and Preference Learning", 2011 (BALD); Kirsch,
van Amersfoort, Gal, "BatchBALD", NeurIPS 2019.
"""

import math
from typing import Literal

import torch
from torch import Tensor

import batchbayes as bb
from batchbayes.decisions import one_for_each
from batchbayes.tools import Categorical, generator, whole_number

Acquisition = Literal["mutual_information", "entropy", "random"]
MOST_CONFIGURATIONS = 4096
"""Joint choices go over all combinations of labels up to this many; beyond, examples are chosen one by one."""
MOST_NUMBERS = 2**22
"""Numbers that a joint choice has in memory at a time. A pool of 50,000 examples would need many gigabytes at once."""


def choose_to_label(
    predictive: bb.CategoricalPredictive | bb.BernoulliPredictive,
    count: int,
    *,
    by: Acquisition = "mutual_information",
    jointly: bool = False,
    seed: int = 0,
) -> Tensor:
    """Return the positions of the examples to label next, the best first, (count,).

    Args:
        predictive: of the unlabelled examples (N, K). For a joint choice it must have kept its draws.
        count: how many to choose.
        by: "mutual_information" (BALD: where draws disagree), "entropy" (where the mean is unsure), or "random".
        jointly: choose examples whose labels together say most about the function (BatchBALD), so that they do not
            repeat each other.
        seed: of a random choice.
    """
    if not isinstance(predictive, bb.CategoricalPredictive | bb.BernoulliPredictive):
        got, fix = f"a {type(predictive).__name__}", "use bb.categorical() or bb.bernoulli()"
        raise bb.BatchbayesError("predictions of classes", got, fix)
    total = len(one_for_each(predictive.entropy))
    if not 1 <= whole_number("count", count) <= total:
        raise bb.BatchbayesError(
            expected=f"between 1 and {total} examples to choose", got=f"{count}", fix="choose fewer"
        )
    if by == "random":
        return torch.randperm(total, generator=generator(seed, "choice"))[:count]
    if by not in ("mutual_information", "entropy") or (jointly and by != "mutual_information"):
        raise bb.BatchbayesError(
            expected='by="mutual_information", "entropy" or "random"; jointly= with the first of them',
            got=f"by={by!r}, jointly={jointly}",
            fix="choose one of these",
        )
    if not jointly:
        return one_for_each(getattr(predictive, by)).argsort(descending=True, stable=True)[:count]
    return _joint_choice(predictive, count)


def _joint_choice(predictive: bb.CategoricalPredictive | bb.BernoulliPredictive, count: int) -> Tensor:
    r"""Add one example after another, each time the one that raises $I(y_{1..b}; f)$ most.

    $I = H(y_{1..b}) - \sum_i E_s H(y_i \mid f_s)$, because labels are independent given the function. Probabilities of
    all combinations of labels so far, (C, S), are kept while they are few. When they would be too many, those of the
    latest example are left out of the joint entropy, and its choice is by single scores.
    """
    logits = getattr(predictive.likelihood, "logits", Categorical().logits)
    probs = logits(predictive.draws.double()).softmax(-1).flatten(1, -2)  # (S, N, K)
    samples, _, classes = probs.shape
    given = -torch.xlogy(probs, probs).sum(-1).mean(0)  # (N,): expected entropy of each label
    joint = torch.ones(1, samples, dtype=torch.float64)
    chosen: list[int] = []
    for _ in range(count):
        parts = probs.split(max(1, MOST_NUMBERS // (len(joint) * classes)), 1)
        each = (torch.einsum("cs,snk->cnk", joint, part) / samples for part in parts)
        gains = torch.cat([-torch.xlogy(p, p).sum((0, 2)) for p in each]) - given
        gains[chosen] = -math.inf
        chosen.append(int(gains.argmax()))
        if len(joint) * classes <= MOST_CONFIGURATIONS:
            joint = torch.einsum("cs,sk->cks", joint, probs[:, chosen[-1]]).flatten(0, 1)
    return torch.tensor(chosen)
