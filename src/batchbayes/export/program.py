"""What a file computes, as torch modules: a step for each draw, and what is said when all draws are done.

A step takes inputs, the number of the draw, its rows of the bank and the running sums, and returns new sums. So a file
holds the network once, in a loop, and memory does not grow with the number of draws. Where all draws are combinations
of one pass, as for the linear engine and the last-layer Laplace approximation, they are made at once.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes.calibrate import flag_limits
from batchbayes.drift.detector import Drift
from batchbayes.errors import BatchbayesError
from batchbayes.export.detectors import Detector, Drifted
from batchbayes.export.linear import Heads, Moves, linear_moves
from batchbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    require_likelihood,
)
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.laplace.last_layer_laplace import LaplacePosterior
from batchbayes.network.function import Network
from batchbayes.novelty.detector import Novelty
from batchbayes.patch import Bank, stack
from batchbayes.posterior import Posterior, num_draws
from batchbayes.predictive import RunningBernoulli, at_least_single
from batchbayes.sums import class_sums, class_uncertainty, merged_moments

MOST_JOINT = 64
"""Up to this number of real outputs, a file has their covariance."""

State = list[Tensor]
Threshold = float | Sequence[float] | None
"""Above which an input is flagged: one number, or one for each target."""


class Intervals(Protocol):
    """Intervals around predictions of real targets."""

    def ends(self, middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return both ends, from the means and the predicted standard deviations, (N, ...)."""
        ...


@dataclass(frozen=True)
class ClassSummary:
    """Sums of probabilities and of entropies."""

    likelihood: Categorical | Bernoulli

    def start(self, outputs: Tensor) -> State:
        """Return sums of nothing for outputs (N, ...), with axes of length one."""
        ndim = self.likelihood.logits(outputs[None]).ndim - 1
        return [outputs.new_zeros([1] * ndim), outputs.new_zeros([1] * (ndim - 1))]

    def add(self, outputs: Tensor, number: Tensor, state: State) -> State:
        """Add the outputs (N, ...) of draw `number`, which is counted from 0."""
        return [old + new for old, new in zip(state, self.total(outputs[None]), strict=True)]

    def total(self, draws: Tensor) -> State:
        """Return the sums of several draws, (S, N, ...)."""
        return class_sums(self.likelihood.logits(draws).log_softmax(-1), partial(torch.sum, dim=0))

    def finish(self, state: State, count: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return what is said, by name, and the uncertainty (N, 1) that a flag is set by."""
        probs, expected_entropy = (each / count for each in state)
        entropy, information = class_uncertainty(probs, expected_entropy)
        information = information if count > 1 else torch.zeros_like(entropy)
        shown = probs[..., 1] if isinstance(self.likelihood.summary(), RunningBernoulli) else probs
        found = {"probs": shown, "entropy": entropy, "mutual_information": information}
        return found, _columns(entropy).mean(1, keepdim=True)


@dataclass(frozen=True)
class ValueSummary:
    """Mean, variance and mean noise. A few outputs have their covariance in place of the variance."""

    likelihood: Gaussian | HeteroscedasticGaussian
    conformal: Intervals | None

    def start(self, outputs: Tensor) -> State:
        return [part.new_zeros([1] * part.ndim) for part in self.total(outputs[None])]

    def add(self, outputs: Tensor, number: Tensor, state: State) -> State:
        return merged_moments(state, number, self.total(outputs[None]), 1, _products)

    def total(self, draws: Tensor) -> State:
        component = self.likelihood(draws)
        middle = component.mean.mean(0)
        moved = component.mean - middle  # (S, N, ...)
        products = moved.movedim(0, -1) @ moved.movedim(0, 1) if _is_joint(middle) else moved.square().sum(0)
        return [middle, products / draws.shape[0], component.variance.expand_as(component.mean).mean(0)]

    def finish(self, state: State, count: int) -> tuple[dict[str, Tensor], Tensor]:
        middle, products, noise = state
        is_joint = products.ndim > middle.ndim
        variance = products.diagonal(dim1=-2, dim2=-1) if is_joint else products
        spread = (variance + noise).sqrt()
        found = {"pred_mean": middle, "pred_std": spread, "epistemic_std": variance.sqrt()}
        if is_joint:
            found["covariance"] = products + noise.diag_embed()
        if self.conformal is not None:
            found["lower"], found["upper"] = self.conformal.ends(middle, spread)
        return found, _columns(variance.sqrt())


Summary = ClassSummary | ValueSummary
"""How outputs of draws become sums, and sums become what a file says."""


def _is_joint(values: Tensor) -> bool:
    """Whether there are several values for each example, but few enough for a matrix."""
    return values.ndim == 2 and 1 < values.shape[1] <= MOST_JOINT


def _products(shift: Tensor) -> Tensor:
    """Return the squares of outputs (N, ...), or the products of all pairs (N, D, D)."""
    return shift[:, :, None] * shift[:, None] if _is_joint(shift) else shift.square()


def _columns(values: Tensor) -> Tensor:
    """Return (N, ...) as (N, columns)."""
    return values.flatten(1) if values.ndim > 1 else values[:, None]


class Step(nn.Module):
    """One pass of the network, added to the running sums."""

    def __init__(self, bank: Bank, summary: Summary, keep: int = 0) -> None:
        """`keep` is the number of draws if their outputs are kept, else 0."""
        super().__init__()
        self.network, self.bank, self._summary, self._keep = bank.network.module, bank, summary, keep

    def forward(self, inputs: Tensor, number: Tensor, rows: list[Tensor], state: State) -> State:
        """Add pass `number` to the sums. With views that are averaged, only each last of them changes the sums."""
        outputs = self._pass(inputs, rows)
        if self.bank.average == 1:
            return self._add(outputs, number, state)
        partial_mean, *sums = state
        total = partial_mean + outputs / self.bank.average
        is_last = (number + 1) % self.bank.average == 0
        added = self._add(total, number.div(self.bank.average, rounding_mode="floor"), sums)
        kept = [torch.where(is_last, new, old) for new, old in zip(added, sums, strict=True)]
        return [torch.where(is_last, torch.zeros_like(total), total), *kept]

    def _add(self, outputs: Tensor, number: Tensor, state: State) -> State:
        """Add the outputs of a draw to the sums, and put them in their place among those that are kept, (N, S, ...)."""
        if not self._keep:
            return self._summary.add(outputs, number, state)
        place = (torch.arange(self._keep) == number).to(outputs.dtype).view(-1, *[1] * (outputs.ndim - 1))
        return [*self._summary.add(outputs, number, state[:-1]), state[-1] + outputs[:, None] * place]

    def start(self, ready: Tensor) -> State:
        """Return sums of nothing, for the outputs of some inputs. They have one element, and broadcast."""
        outputs = self._pass(ready, [row[0] for row in self.bank.rows])
        sums, nothing = self._summary.start(outputs), outputs.new_zeros([1] * outputs.ndim)
        return [*[nothing] * self.num_partial, *sums, *([nothing[None]] if self._keep else [])]

    @property
    def num_partial(self) -> int:
        """How many of the first sums are of no use in the end."""
        return int(self.bank.average > 1)

    def _pass(self, inputs: Tensor, rows: list[Tensor]) -> Tensor:
        """Return the outputs (N, ...) of one draw."""
        outputs = self.bank.patch(rows)(inputs)
        return outputs.to(at_least_single(outputs.dtype))  # the digits of half precision are too few for sums


class Loop(nn.Module):
    """All draws, one after the other."""

    def __init__(self, step: Step, ready: Tensor) -> None:
        """`ready` are some inputs of the network, which say what shape its outputs have."""
        super().__init__()
        self.step, self.passes = step, len(step.bank.rows[0]) if step.bank.rows else 1
        with torch.no_grad():
            self.state = step.start(ready)

    def forward(self, ready: Tensor) -> State:
        """Return the sums, in the order that `Finish` takes."""
        state, rows = self.state, self.step.bank.rows
        for number in range(self.passes):
            state = self.step(ready, torch.tensor(number), [bank[number] for bank in rows], state)
        return state[self.step.num_partial :]


class AtOnce(nn.Module):
    """All draws from one pass and a few more, for each example by itself."""

    def __init__(self, moves: Moves | Heads, summary: Summary, keep: int) -> None:
        super().__init__()
        self.moves, self._summary, self._keep = moves, summary, keep

    def forward(self, ready: Tensor) -> State:
        draws = self.moves(ready)  # (S, N, ...)
        draws = draws.to(at_least_single(draws.dtype))
        return [*self._summary.total(draws), *([draws.transpose(0, 1)] if self._keep else [])]


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Finish(nn.Module):
    """What is said about each input when all draws are done."""

    def __init__(self, summary: Summary, count: int, threshold: Threshold, level: float, keep: int) -> None:
        super().__init__()
        in_nats = isinstance(summary, ClassSummary)
        self._limits = torch.finfo(torch.float64).max if threshold is None else flag_limits(threshold, in_nats=in_nats)
        self._summary, self._count, self._level, self._keep = summary, count, level, keep

    def forward(self, inputs: Tensor, state: State, p_value: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of the file by name.

        An input is flagged if it is uncertain, unlike the training data, or no number.

        Args:
            inputs: those of the file.
            state: the sums of all steps.
            p_value: that of the novelty detector, (N,).
        """
        sums = state[:-1] if self._keep else state
        found, uncertainty = self._summary.finish(sums, self._count)
        flag = ~(uncertainty.double() <= self._limits).all(1)  # also for NaN
        if inputs.is_floating_point():
            flag = flag | ~(inputs.abs() <= torch.finfo(inputs.dtype).max).flatten(1).all(1)
        if self._keep:
            found["draws"] = state[-1]
        if p_value is not None:
            found["novelty"] = p_value
            flag = flag | (p_value <= self._level)
        return found | {"flag": flag}


class Beside(NamedTuple):
    """Modules with the network in them. They are no submodules: torch.export cannot have the network in two."""

    detector: nn.Module | None
    drift: nn.Module | None
    network: nn.Module


class Program(nn.Module):
    """The whole prediction: inputs (N, ...) in, outputs by name out."""

    def __init__(
        self,
        prepare: nn.Module | None,
        draws: Loop | AtOnce,
        finish: Finish,
        detector: nn.Module | None,
        drift: nn.Module | None,
        network: nn.Module,
    ) -> None:
        super().__init__()
        self.prepare, self.draws, self.finish = prepare, draws, finish
        self.beside = Beside(detector, drift, network)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Make all draws, and say what they say."""
        ready = self.ready(inputs)
        detector, drift, _ = self.beside
        found = self.finish(inputs, self.draws(ready), None if detector is None else detector(ready))
        return found if drift is None else found | drift(ready)

    def ready(self, inputs: Tensor) -> Tensor:
        """Return the inputs of the network."""
        return inputs if self.prepare is None else self.prepare(inputs.clone())


@contextmanager
def words_for_exporter() -> Iterator[None]:
    """Say in words what torch's exporter cannot do. It raises errors of many kinds, and some are its own."""
    try:
        yield
    except BatchbayesError as error:
        if error.__cause__ is None:
            raise
        raise _not_written(error.__cause__) from error
    except ImportError as error:
        raise BatchbayesError(
            expected=f"an onnxscript that knows torch {torch.__version__}",
            got=str(error),
            fix="pip install --upgrade onnxscript, or write a .pt2 file",
        ) from error
    except Exception as error:
        raise _not_written(error.__cause__ or error) from error


def _not_written(cause: BaseException) -> BatchbayesError:
    return BatchbayesError(
        expected="a network that torch.export can write down for any number of inputs",
        got=f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0][:300],
        fix="take numpy, loops over examples, and conditions on the values of tensors out of forward()",
    )


def build_program(
    posterior: Posterior,
    examples: Tensor,
    likelihood: Likelihood[Any],
    *,
    num_samples: int | None = None,
    seed: int = 0,
    conformal: Intervals | None = None,
    threshold: Threshold = None,
    novelty: Novelty | None = None,
    novelty_level: float = 0.01,
    drift: Drift | None = None,
    prepare: nn.Module | None = None,
    engine: Literal["sample", "linear"] = "sample",
    keep_draws: bool = False,
) -> Program:
    """Return the program that predicts with a posterior. The arguments are those of `export`."""
    require_likelihood(likelihood)
    network, summary = _copied(posterior), summary_of(likelihood, conformal)
    count = num_draws(posterior, None if num_samples is None else whole_number("num_samples", num_samples))
    ready = examples if prepare is None else prepare(examples.clone())
    keep = count if keep_draws else 0
    draws: Loop | AtOnce
    if isinstance(posterior, LaplacePosterior):
        draws = AtOnce(Heads(posterior, network, count, seed), summary, keep)
    elif engine == "linear" and isinstance(posterior, BatchNormPosterior) and not posterior.is_point:
        contrasts = bool(likelihood.shift_invariant) and not keep_draws
        with words_for_exporter():
            draws = AtOnce(linear_moves(posterior, network, ready, count, seed, contrasts=contrasts), summary, keep)
    else:
        bank = stack([posterior.draw(seed, index) for index in range(count)], ready)
        bank = replace(bank, network=replace(network, output=bank.network.output))
        draws = Loop(Step(bank, summary, keep), ready)
    finish = Finish(summary, count, threshold, novelty_level, keep)

    def watched(by: Novelty | Drift) -> Network:
        return network if posterior.needs_weights else _copied(by)

    def said(outputs: Tensor) -> dict[str, Tensor]:
        return summary.finish(summary.total(outputs[None]), 1)[0]

    detector = None if novelty is None else Detector(novelty, watched(novelty))
    drifted = None if drift is None else Drifted(drift, watched(drift), said)
    return Program(prepare, draws, finish, detector, drifted, network.module).eval()


def _copied(posterior: Posterior | Novelty | Drift) -> Network:
    """Return a copy of the posterior's network on the CPU, because torch's exporter works inside of modules."""
    network = getattr(posterior, "network", None)
    if not isinstance(network, Network):
        raise BatchbayesError(
            expected="a posterior of one network, as bb.mcbn(model, batches) returns it",
            got=f"a {type(posterior).__name__}",
            fix="fit first, or pass bb.deterministic(model)",
        )
    return Network(copy.deepcopy(network.module).cpu().requires_grad_(False), network.output)


def summary_of(likelihood: object, conformal: Intervals | None) -> Summary:
    """Return the sums that belong to a likelihood."""
    if isinstance(likelihood, Categorical | Bernoulli):
        if conformal is not None:
            raise BatchbayesError("intervals for real targets only", "intervals for classes", "drop conformal=")
        return ClassSummary(likelihood)
    if isinstance(likelihood, Gaussian | HeteroscedasticGaussian):
        return ValueSummary(likelihood, conformal)
    raise BatchbayesError(
        expected="one of our own likelihoods, which a file can hold",
        got=type(likelihood).__name__,
        fix="use bb.categorical(), bb.bernoulli(), bb.gaussian(...) or bb.heteroscedastic_gaussian()",
    )
