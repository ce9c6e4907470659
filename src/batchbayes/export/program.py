"""What a file computes, as torch modules: a step for each draw, and what is said when all draws are done.

A step takes inputs, the number of the draw, its rows of the bank and the running sums, and returns new sums. So a file
holds the network once, in a loop, and memory does not grow with the number of draws.

Running sums over draws, as the steps of a file compute them: the counterpart of the sums in `predictive.py`.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes.errors import BatchbayesError
from batchbayes.export.linear import Moves, linear_moves
from batchbayes.export.posteriors import Bank, BankedView, Detector, bank_views, fill_bank
from batchbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    require_likelihood,
)
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior
from batchbayes.methods.views.with_views import ViewsPosterior
from batchbayes.network.function import Network, pick_output
from batchbayes.network.shadow import workplace
from batchbayes.novelty.detector import Novelty
from batchbayes.posterior import Posterior, num_draws
from batchbayes.predictive import RunningBernoulli, at_least_single

ROUNDING = 1e-5
"""How far above the threshold an uncertainty must be for a flag: in nats, or as a share of a standard deviation. A file
rounds otherwise than `predict`, which may have set the threshold to the uncertainty of a row."""


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
        log_probs = self.likelihood.logits(outputs[None])[0].log_softmax(-1)  # (N, ..., K)
        probs = log_probs.exp()
        return [state[0] + probs, state[1] - (probs * log_probs).sum(-1)]

    def total(self, draws: Tensor) -> State:
        """Return the sums of all draws at once, (S, N, ...)."""
        log_probs = self.likelihood.logits(draws).log_softmax(-1)
        probs = log_probs.exp()
        return [probs.sum(0), -(probs * log_probs).sum(-1).sum(0)]

    def finish(self, state: State, count: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return what is said, by name, and the uncertainty (N, 1) that a flag is set by."""
        probs = state[0] / count
        entropy = -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
        information = (entropy - state[1] / count).clamp_min(0) if count > 1 else torch.zeros_like(entropy)
        shown = probs[..., 1] if isinstance(self.likelihood.summary(), RunningBernoulli) else probs
        found = {"probs": shown, "entropy": entropy, "mutual_information": information}
        return found, entropy.reshape(entropy.shape[0], -1).mean(1, keepdim=True)


@dataclass(frozen=True)
class ValueSummary:
    """Mean, sum of squared deviations (Welford's update) and mean noise."""

    likelihood: Gaussian | HeteroscedasticGaussian
    conformal: Intervals | None

    def start(self, outputs: Tensor) -> State:
        return [outputs.new_zeros([1] * outputs.ndim) for _ in range(3)]

    def add(self, outputs: Tensor, number: Tensor, state: State) -> State:
        component, share = self.likelihood(outputs[None]), 1 / (number + 1)
        value, noise = component.mean[0], component.variance.expand_as(component.mean)[0]
        middle, squares, noises = state
        moved = middle + (value - middle) * share
        return [moved, squares + (value - middle) * (value - moved), noises + (noise - noises) * share]

    def total(self, draws: Tensor) -> State:
        component = self.likelihood(draws)
        middle = component.mean.mean(0)
        squares = (component.mean - middle).square().sum(0)
        return [middle, squares, component.variance.expand_as(component.mean).mean(0)]

    def finish(self, state: State, count: int) -> tuple[dict[str, Tensor], Tensor]:
        middle, squares, noise = state[:3]
        variance = squares / count
        spread = (variance + noise).sqrt()
        found = {"pred_mean": middle, "pred_std": spread, "epistemic_std": variance.sqrt()}
        if self.conformal is not None:
            found["lower"], found["upper"] = self.conformal.ends(middle, spread)
        return found, variance.sqrt().reshape(variance.shape[0], -1)


Summary = ClassSummary | ValueSummary
"""How outputs of draws become sums, and sums become what a file says."""


class Step(nn.Module):
    """One pass of the network, added to the running sums."""

    def __init__(
        self, network: Network, bank: Bank, views: Sequence[BankedView], average: int, summary: Summary
    ) -> None:
        super().__init__()
        self.network, self._output = network.module, network.output
        self._bank, self._views, self._average, self._summary = bank, views, average, summary

    def rows(self) -> list[Tensor]:
        """Return the bank, one tensor (V, ...) for each row that a step takes."""
        return [*self._bank.rows(), *(view.rows for view in self._views)]

    def forward(self, inputs: Tensor, number: Tensor, rows: list[Tensor], state: State) -> State:
        """Add pass `number` to the sums. With views that are averaged, only each last of them changes the sums."""
        outputs = self._pass(inputs, rows)
        if self._average == 1:
            return self._summary.add(outputs, number, state)
        *sums, partial_mean = state
        total = partial_mean + outputs / self._average
        is_last = (number + 1) % self._average == 0
        added = self._summary.add(total, number.div(self._average, rounding_mode="floor"), sums)
        kept = [torch.where(is_last, new, old) for new, old in zip(added, sums, strict=True)]
        return [*kept, torch.where(is_last, torch.zeros_like(total), total)]

    def start(self, outputs: Tensor) -> State:
        """Return sums of nothing, for outputs of this shape. They have one element, and broadcast."""
        sums = self._summary.start(outputs)
        return sums if self._average == 1 else [*sums, outputs.new_zeros([1] * outputs.ndim)]

    def _pass(self, inputs: Tensor, rows: list[Tensor]) -> Tensor:
        """Return the outputs (N, ...) of one draw on its view of the inputs."""
        count = len(self._bank.rows())
        view_rows = list(zip(self._views, rows[count:], strict=True))
        seen = inputs
        for view, row in view_rows:
            seen = view.look(seen, row)
        outputs = self.outputs(seen, rows[:count])
        if inputs.ndim >= 3 and outputs.ndim >= 3 and outputs.shape[-2:] == inputs.shape[-2:]:
            for view, row in reversed(view_rows):
                outputs = view.back(outputs, row)
        return outputs.to(at_least_single(outputs.dtype))  # the digits of half precision are too few for sums

    def outputs(self, inputs: Tensor, rows: list[Tensor]) -> Tensor:
        """Return the outputs of the network with one draw of the bank in it."""
        tensors, masks = self._bank.named(rows)
        calls: Counter[str] = Counter()

        def masked(name: str, activations: Tensor) -> Tensor:
            factor, offset = masks[name][calls[name]]
            calls[name] += 1
            return activations * factor + offset

        with workplace(self.network) as place:
            place.prepare({"tensors": tensors, "instead": {name: partial(masked, name) for name in masks}})
            return pick_output(place.module(inputs), self._output)


class Finish(nn.Module):
    """What is said about each input when all draws are done."""

    def __init__(self, summary: Summary, count: int, threshold: Threshold, level: float) -> None:
        super().__init__()
        self._threshold = None
        if threshold is not None:
            each = torch.as_tensor(threshold, dtype=torch.float64).reshape(-1)
            unit = torch.ones_like(each) if isinstance(summary, ClassSummary) else each.abs()
            self._threshold = each + ROUNDING * unit
        self._summary, self._count, self._level = summary, count, level

    def forward(self, state: State, p_value: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of the file by name. An input is flagged if it is uncertain or unlike the training data.

        Args:
            state: the sums of all steps.
            p_value: that of the novelty detector, (N,).
        """
        found, uncertainty = self._summary.finish(state, self._count)
        flags = [] if self._threshold is None else [(uncertainty.double() > self._threshold).any(1)]
        if p_value is not None:
            found["novelty"] = p_value
            flags.append(p_value <= self._level)
        if flags:
            found["flag"] = torch.stack(flags).any(0)
        return found


class Program(nn.Module):
    """The whole prediction: inputs (N, ...) in, outputs by name out."""

    def __init__(
        self, prepare: nn.Module | None, step: Step, finish: Finish, detector: nn.Module | None, ready: Tensor
    ) -> None:
        """`ready` are some inputs of the network, which say what shape its outputs have."""
        super().__init__()
        self.prepare, self.step, self.finish = prepare, step, finish
        self._detector = (detector,)  # no submodule: torch.export cannot have the network in two
        with torch.no_grad():
            self.state = step.start(step._pass(ready, [bank[0] for bank in step.rows()]))
        self.passes = len(step.rows()[0]) if step.rows() else 1

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Run all steps, one after the other."""
        ready = inputs if self.prepare is None else self.prepare(inputs)
        state, rows = self.state, self.step.rows()
        for number in range(self.passes):
            state = self.step(ready, torch.tensor(number), [bank[number] for bank in rows], state)
        return self.finish(state, None if self.detector is None else self.detector(ready))

    @property
    def detector(self) -> nn.Module | None:
        return self._detector[0]

    @property
    def network(self) -> nn.Module:
        return self.step.network

    def bank(self) -> list[Tensor]:
        """Return the tensors that the file holds beside the network."""
        return self.step.rows()


@contextmanager
def words_for_exporter() -> Iterator[None]:
    """Say in words what torch's exporter cannot do. It raises errors of many kinds, and some are its own."""
    try:
        yield
    except BatchbayesError:
        raise
    except ImportError as error:
        raise BatchbayesError(
            expected=f"an onnxscript that knows torch {torch.__version__}",
            got=str(error),
            fix="pip install --upgrade onnxscript, or write a .pt2 file",
        ) from error
    except Exception as error:
        cause = error.__cause__ or error
        raise BatchbayesError(
            expected="a network that torch.export can write down for any number of inputs",
            got=f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0][:300],
            fix="take numpy, loops over examples, and conditions on the values of tensors out of forward()",
        ) from error


class Total(nn.Module):
    """All draws of the linear engine, as sums."""

    def __init__(self, moves: Moves, summary: Summary) -> None:
        super().__init__()
        self.moves, self._summary = moves, summary

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the sums, in the order that `Finish` takes."""
        return tuple(self._summary.total(self.moves(inputs)))


class LinearProgram(nn.Module):
    """The whole prediction by the linear engine."""

    def __init__(
        self, prepare: nn.Module | None, total: Total, finish: Finish, detector: nn.Module | None, network: nn.Module
    ) -> None:
        super().__init__()
        self.prepare, self.total, self.finish = prepare, total, finish
        self._detector, self._network = (detector,), (network,)  # no submodules, as in `Program`

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Make all draws at once."""
        ready = inputs if self.prepare is None else self.prepare(inputs)
        return self.finish(list(self.total(ready)), None if self.detector is None else self.detector(ready))

    @property
    def detector(self) -> nn.Module | None:
        return self._detector[0]

    @property
    def network(self) -> nn.Module:
        return self._network[0]

    def bank(self) -> list[Tensor]:
        """Return the tensors that the file holds beside the network."""
        known = {id(tensor) for tensor in (*self.network.parameters(), *self.network.buffers())}
        return [each for each in (*self.total.parameters(), *self.total.buffers()) if id(each) not in known]


def build_program(
    posterior: Posterior,
    examples: Tensor,
    likelihood: Likelihood[Any],
    *,
    num_samples: int = 64,
    seed: int = 0,
    conformal: Intervals | None = None,
    threshold: Threshold = None,
    novelty: Novelty | None = None,
    novelty_level: float = 0.01,
    prepare: nn.Module | None = None,
    engine: Literal["sample", "linear"] = "sample",
) -> "Program | LinearProgram":
    """Return the program that predicts with a posterior. The arguments are those of `export`."""
    require_likelihood(likelihood)
    network, summary = _copied(posterior), summary_of(likelihood, conformal)
    num_samples = num_draws(posterior, whole_number("num_samples", num_samples))
    ready = examples if prepare is None else prepare(examples)
    finish = Finish(summary, num_samples, threshold, novelty_level)
    detector = None if novelty is None else Detector(novelty, network)
    if engine == "linear" and isinstance(posterior, BatchNormPosterior) and not posterior.is_point:
        with words_for_exporter():
            moves = linear_moves(
                posterior, network, ready, num_samples, seed, contrasts=bool(likelihood.shift_invariant)
            )
        return LinearProgram(prepare, Total(moves, summary), finish, detector, network.module).eval()
    return Program(
        prepare, _step(posterior, network, ready, summary, num_samples, seed), finish, detector, ready
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
