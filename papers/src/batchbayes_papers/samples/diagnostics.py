"""Do chains agree, and how many independent samples are they worth? Looked at in function space.

Weights of a network can be permuted without any change of its function, so chains are compared by their outputs on some
inputs. References: Gelman, Rubin, Statistical Science 7 (1992); Geyer, Statistical Science 7 (1992); Vehtari et al.,
Bayesian Analysis 16 (2021), for splitting chains.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchbayes import BatchbayesError, WeightSamples


@dataclass(frozen=True, eq=False)
class ChainDiagnostics:
    """How well chains agree on each output."""

    r_hat: Tensor
    """(N, ...): near 1 if chains agree; above 1.01 they do not yet."""
    effective_sample_size: Tensor
    """(N, ...): how many independent samples the chains are worth."""
    log_posterior: Tensor | None
    """The trace, (chains, samples); None if it was not kept."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(R-hat up to {self.r_hat.max():.3f}, "
            f"effective sample size from {self.effective_sample_size.min():.0f})"
        )


@torch.no_grad()
def chain_diagnostics(posterior: WeightSamples, inputs: Tensor) -> ChainDiagnostics:
    """Compare the chains of `sg_mcmc` by their outputs on some inputs (N, ...).

    >>> from batchbayes.methods.samples.sg_mcmc import sg_mcmc
    >>> from batchbayes.training.loop import TrainingConfig, half_squared_error
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> config = TrainingConfig(epochs=50, batch_size=16, learning_rate=0.1)
    >>> samples = sg_mcmc(lambda: torch.nn.Linear(1, 1), (x, x), half_squared_error, config, num_chains=4)
    >>> chain_diagnostics(samples, x[:3]).r_hat.shape
    torch.Size([3, 1])
    """
    if not isinstance(posterior, WeightSamples):
        raise BatchbayesError(
            expected="samples of the weights of one network, as bb.sg_mcmc returns them",
            got=f"a {type(posterior).__name__}",
            fix="for several files of weights call bb.weight_samples first",
        )
    members = [posterior.tensors(number) for number in range(posterior.num_members)]
    inputs = inputs.to(posterior.device)
    outputs = torch.stack([posterior.network(inputs, tensors=member) for member in members])
    values = outputs.double().cpu().unflatten(0, (posterior.num_chains, -1))  # (C, S, N, ...)
    trace = posterior.log_posterior
    return ChainDiagnostics(
        r_hat(values), effective_sample_size(values), None if trace is None else trace.view(posterior.num_chains, -1)
    )


def r_hat(values: Tensor) -> Tensor:
    r"""Return the split R-hat of quantities (C, S, ...), (...).

    Each chain is cut into halves. $\hat R^2 = \frac{n-1}{n} + \frac{B}{W}$ with the mean W of the variances within the
    halves, of length n, and the variance B of their means. It is 1 where all samples are equal.

    >>> r_hat(torch.tensor([[0.0, 1.0, 0.0, 1.0], [5.0, 6.0, 5.0, 6.0]]))
    tensor(4.1433)
    """
    halves = _halves(values)
    count = halves.shape[1]
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    return torch.where(_constant(values), 1.0, ((count - 1) / count + between / within).sqrt())


def effective_sample_size(values: Tensor) -> Tensor:
    r"""Return how many independent samples quantities (C, S, ...) are worth, (...).

    $C S / (1 + 2\sum_t\rho_t)$ with autocorrelations from the halves of all chains: chains that drift are worth
    little. The sum ends before the first pair of neighbouring ones whose sum is not positive (Geyer). It is $C S$ where
    all samples are equal.
    """
    total_count, is_constant, values = float(values.shape[0] * values.shape[1]), _constant(values), _halves(values)
    chains, count = values.shape[:2]
    centred = values - values.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * count, dim=1).abs().square()
    covariances = torch.fft.irfft(spectrum, n=2 * count, dim=1)[:, :count].mean(0) / count  # (S, ...)
    within = covariances[0] * count / (count - 1)
    total = covariances[0] + values.mean(1).var(0)
    correlations = 1 - (within - covariances) / total
    pairs = correlations[: count // 2 * 2].unflatten(0, (-1, 2)).sum(1)  # (S / 2, ...)
    positive = (pairs > 0).cumprod(0).to(pairs)
    time = -1 + 2 * (torch.cummin(pairs, 0).values * positive).sum(0)
    found = chains * count / time.clamp_min(1 / torch.tensor(float(chains * count)).log10())
    return torch.where(is_constant, total_count, found)


def _constant(values: Tensor) -> Tensor:
    """Return where all samples of all chains are equal, as the outputs of units that are never active."""
    return values.amax((0, 1)) == values.amin((0, 1))


def _halves(values: Tensor) -> Tensor:
    """Cut each chain into two: (C, S, ...) -> (2 C, S // 2, ...)."""
    half = _four_or_more(values).shape[1] // 2
    return torch.cat([values[:, :half], values[:, -half:]])


def _four_or_more(values: Tensor) -> Tensor:
    if values.shape[1] < 4:
        got, fix = f"{values.shape[1]}", "keep more samples, num_samples="
        raise BatchbayesError(expected="four samples or more in each chain", got=got, fix=fix)
    return values
