"""From a posterior to the program that a file computes."""

import copy
from typing import Any

from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes.calibrate import ConformalIntervals
from batchbayes.deploy.bank import fill_bank
from batchbayes.deploy.detector import Detector
from batchbayes.deploy.program import Finish, Program, Step
from batchbayes.deploy.summaries import Summary, summary_of
from batchbayes.deploy.views import bank_views
from batchbayes.detection.novelty import Novelty
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Likelihood, require_likelihood
from batchbayes.methods.views.posterior import ViewsPosterior
from batchbayes.network import Network
from batchbayes.posterior import Posterior, num_draws


def build_program(
    posterior: Posterior,
    examples: Tensor,
    likelihood: Likelihood[Any],
    *,
    num_samples: int = 64,
    seed: int = 0,
    conformal: ConformalIntervals | None = None,
    threshold: float | None = None,
    novelty: Novelty | None = None,
    novelty_level: float = 0.01,
    prepare: nn.Module | None = None,
) -> Program:
    """Return the program that predicts with a posterior. The arguments are those of `export`."""
    require_likelihood(likelihood)
    network, summary = _copied(posterior), summary_of(likelihood, conformal)
    num_samples = num_draws(posterior, whole_number("num_samples", num_samples))
    ready = examples if prepare is None else prepare(examples)
    return Program(
        prepare,
        _step(posterior, network, ready, summary, num_samples, seed),
        Finish(summary, num_samples, threshold, novelty_level),
        None if novelty is None else Detector(novelty, network),
        ready,
    ).eval()


def _step(posterior: Posterior, network: Network, example: Tensor, summary: Summary, count: int, seed: int) -> Step:
    """Return the step of a posterior, on a network that is a copy of the posterior's own."""
    if not isinstance(posterior, ViewsPosterior):
        return Step(network, fill_bank(posterior, example, count, seed), (), 1, summary)
    passes = count * posterior.average
    bank = fill_bank(posterior.posterior, example, passes, seed)
    return Step(network, bank, bank_views(posterior, passes, seed), posterior.average, summary)


def _copied(posterior: Posterior) -> Network:
    """Return a copy of the posterior's network on the CPU, because torch's exporter works inside of modules."""
    network = getattr(posterior, "network", None)
    if not isinstance(network, Network):
        raise BatchbayesError(
            expected="a posterior of one network, as bb.mcbn(model, batches) returns it",
            got=f"a {type(posterior).__name__}",
            fix="fit first, or pass bb.deterministic(model)",
        )
    try:
        return Network(copy.deepcopy(network.module).cpu().requires_grad_(False), network.output)
    except Exception as error:
        raise BatchbayesError(
            expected="a network that can be copied",
            got=f"{type(network.module).__name__}, and {type(error).__name__}: {error}"[:300],
            fix="take locks, files and tensors with gradients out of its attributes",
        ) from error
