"""What a file computes, as torch modules: a step for each draw, and what is said when all draws are done.

A step takes inputs, the number of the draw, its rows of the bank and the running sums, and returns new sums. So a file
holds the network once, in a loop, and memory does not grow with the number of draws.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes._common.checks import whole_number
from batchbayes.calibrate import ConformalIntervals
from batchbayes.deploy.bank import Bank, fill_bank
from batchbayes.deploy.detector import Detector
from batchbayes.deploy.summaries import ClassSummary, State, Summary, summary_of
from batchbayes.deploy.views import BankedView, bank_views
from batchbayes.detection.novelty import Novelty
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import Likelihood, require_likelihood
from batchbayes.methods.views.posterior import ViewsPosterior
from batchbayes.network import Network, pick_output
from batchbayes.posterior import Posterior, num_draws
from batchbayes.running_sums import at_least_single
from batchbayes.shadow import workplace

ROUNDING = 1e-5
"""How far above the threshold an uncertainty must be for a flag: in nats, or as a share of a standard deviation. A file
rounds otherwise than `predict`, which may have set the threshold to the uncertainty of a row."""


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

    def __init__(self, summary: Summary, count: int, threshold: float | None, level: float) -> None:
        super().__init__()
        unit = 1.0 if threshold is None or isinstance(summary, ClassSummary) else abs(threshold)
        self._threshold = None if threshold is None else threshold + ROUNDING * unit
        self._summary, self._count, self._level = summary, count, level

    def forward(self, state: State, p_value: Tensor | None = None) -> dict[str, Tensor]:
        """Return the outputs of the file by name. An input is flagged if it is uncertain or unlike the training data.

        Args:
            state: the sums of all steps.
            p_value: that of the novelty detector, (N,).
        """
        found, uncertainty = self._summary.finish(state, self._count)
        flags = [] if self._threshold is None else [uncertainty > self._threshold]
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
