r"""Novelty: has the network seen such an input?

A forward pass answers two questions about each input. *Does it look like the training data?* The answer is the
Mahalanobis distance of its statistics at all batch-norm sites (see `statistics.py`) from those of training examples of
the class that the network predicts. *Does it look like any class?* There are two answers: the energy of the logits,
$-\log \sum_k e^{f_k}$ (Liu et al., NeurIPS 2020), and how much more likely the known classes make its statistics. Each
answer becomes a surprise, $-\log p$ among examples that were not used for the fit. The score is the surprise of the
first question plus the mean surprise of the second, as in Fisher's combination of p-values. So one question cannot hide
what the other one sees.

The p-value of the score is conformal: at most a share a of ordinary inputs has a p-value of a or less, if ordinary
inputs are like the examples that it is calibrated on. **A classifier knows its training examples better than new ones
of the same kind.** So pass data that the network was not trained on as `calibration`, to get p-values that hold for new
inputs. Calibrated on training examples that were not used for the fit, two public networks flagged 1.3 to 3.5 times as
many new images as the level says (docs/results/novelty.md), and a warning says so.

Novelty is not uncertainty. It says little about errors on ordinary inputs, and little about new classes that look like
the known ones.
"""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from batchbayes._common import text
from batchbayes._common.checks import whole_number
from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.batches import Batches, chunks, cut, evenly, first_of, input_stream, known_length
from batchbayes.network.function import Network, as_network
from batchbayes.network.inputs import Picker, require_finite
from batchbayes.novelty.scores import ClassGaussian, conformal_p_value, fit_gaussian, surprise
from batchbayes.novelty.statistics import Sight, watch

CHUNK = 2**18
"""Input numbers in one forward pass, so that activations stay in the caches of a CPU."""
NUMBERS = 2**26
"""Statistics that are kept during the fit (256 MiB; the fit makes a few copies). A network with very many channels is
fitted to fewer examples, for example a ResNet-50 to some 800."""
MOST = 1e12
"""Parts of a score are clipped here, so that an infinite output gives a finite score."""
NO_ENERGY = 0.01
"""The energy of log-probabilities is zero. In half precision it is rounded by less than this."""
FEWEST = 40
"""Training examples. With fewer, no p-value could be small."""


_GAUSSIAN = ("mean", "std", "directions", "centres")
_SCORES = ("ordinary_parts", "ordinary_sites", "calibration_scores")


@dataclass(frozen=True, eq=False)
class NoveltyReport:
    """What one forward pass says about each of N inputs."""

    score: Tensor
    """How unusual the input is, (N,). Higher is more unusual."""
    p_value: Tensor
    """Share of ordinary inputs that are at least as unusual, (N,)."""
    site: tuple[str, ...]
    """The name of the batch-norm layer where the input is most unusual."""
    site_p_value: Tensor
    """How unusual the input is at that layer, (N,): the p-value of the layer alone, not corrected for the choice of
    the most unusual layer. Far from ordinary values it is an extrapolation, so it can be extremely small."""


@dataclass(frozen=True, eq=False)
class Novelty:
    """A fitted detector of unusual inputs. Any number of threads may use it at once."""

    kind: ClassVar[str] = "novelty"
    sight: Sight
    gaussian: ClassGaussian
    ordinary_parts: Tensor
    """The parts of the score for training examples that were not used for the fit, (n, 1 to 3)."""
    ordinary_sites: Tensor
    """Distances at each site for the same examples, (n, sites)."""
    calibration_scores: Tensor
    """Scores of the examples that p-values are calibrated on, (m,)."""
    held_out: bool
    """Whether those are data that the network was not trained on."""

    @property
    def network(self) -> Network:
        """The network that is watched. A file has a fingerprint of its weights."""
        return self.sight.network

    def report(self, data: Batches, *, inputs: Picker = None, chunk_size: int | None = None) -> NoveltyReport:
        """Return score, p-value and most unusual site of each input, from one forward pass.

        Args:
            data: a tensor (N, ...), or an iterable of batches such as a DataLoader.
            inputs: where the inputs are in a batch, if they are not first: a key, a position or a function.
            chunk_size: examples in one forward pass.
        """
        self.sight.warn_if_changed()
        found = [
            self.parts(*self.sight(chunk)) for chunk in chunks(data, chunk_size, inputs, numbers=CHUNK) if len(chunk)
        ]
        if not found:
            raise BatchbayesError(expected="at least one example", got="none", fix="check the data")
        parts, sites = (torch.cat(column) for column in zip(*found, strict=True))
        score = _score(self.ordinary_parts, parts)
        at_site, site = surprise(self.ordinary_sites, sites).max(1)
        names = tuple(self.sight.places[index].name for index in site.tolist())
        return NoveltyReport(score, conformal_p_value(self.calibration_scores, score), names, (-at_site).exp())

    def parts(self, statistics: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return distance, energy and evidence (N, 1 to 3), as far as there are logits, and distances by site."""
        z = self.gaussian.standardise(statistics)
        distance, evidence = self.gaussian.distances(z, predicted_classes(logits))
        energy = -logits.logsumexp(1).nan_to_num(nan=-torch.inf)
        parts = torch.stack([distance, energy, evidence][: 1 + min(2, logits.shape[1])], 1)
        by_site = z.split([place.size for place in self.sight.places], dim=1)
        return parts.clamp(max=MOST), torch.stack([part.square().mean(1) for part in by_site], 1)

    def score(self, data: Batches, **options: Any) -> Tensor:
        """Return how unusual each input is, (N,). Higher is more unusual. The options are those of `report`."""
        return self.report(data, **options).score

    def p_value(self, data: Batches, **options: Any) -> Tensor:
        """Return the share of ordinary inputs that are at least as unusual, (N,). The options are those of `report`."""
        return self.report(data, **options).p_value

    def flag(self, data: Batches, level: float = 0.01, **options: Any) -> Tensor:
        """Return which inputs are unusual, (N,) bool. At most a share of `level` of ordinary inputs is flagged."""
        level = self.checked_level(level)
        return self.p_value(data, **options) <= level

    @property
    def least_level(self) -> float:
        """The smallest p-value there is, which depends on the number of calibration examples."""
        return 1 / (len(self.calibration_scores) + 1)

    def checked_level(self, level: float) -> float:
        """Return the level, or raise an error if no input or every input would be flagged at it."""
        if not isinstance(level, numbers.Real) or not self.least_level <= level <= 1:
            raise BatchbayesError(
                expected=f"a level from {self.least_level:.2g}, the smallest p-value there is, to 1",
                got=f"{level!r}",
                fix="raise the level, or calibrate on more examples",
            )
        return float(level)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a header of JSON values, and tensors, for `save`."""
        header = self.sight.header() | {"rest": self.gaussian.rest, "held_out": self.held_out}
        tensors = {name: getattr(self, name) for name in _SCORES} | {"units": self.sight.units}
        return header, tensors | {name: getattr(self.gaussian, name) for name in _GAUSSIAN}

    @classmethod
    def restore(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Self:
        """Build it from what `state` returned and the user's network."""
        sight = Sight.restore(header, tensors["units"], model)
        gaussian = ClassGaussian(**{name: tensors[name] for name in _GAUSSIAN}, rest=header["rest"])
        if not gaussian.mean.shape == gaussian.std.shape == gaussian.centres[0].shape == (sight.size,):
            raise ValueError(f"a mean of shape {tuple(gaussian.mean.shape)} for {sight.size} statistics")
        return cls(sight, gaussian, **{name: tensors[name] for name in _SCORES}, held_out=header["held_out"])

    def __repr__(self) -> str:
        source = "held-out" if self.held_out else "training"
        return (
            f"Novelty({self.sight.network}: {text.count(len(self.sight.places), 'site')}, "
            f"{self.sight.size} statistics, calibrated on {len(self.calibration_scores)} {source} examples)"
        )


def novelty(
    model: nn.Module,
    batches: Batches,
    *,
    calibration: Batches | None = None,
    num_examples: int = 8000,
    logits: bool | None = None,
    seed: int = 0,
    inputs: Picker = None,
    output: str | int | None = None,
) -> Novelty:
    """Fit a detector of inputs unlike the training data. It costs one forward pass for each input that it judges.

    Args:
        model: a trained network with batch normalisation. It is left as it is.
        batches: training data as it looks at prediction time: without random crops, flips or noise. At least 40
            examples are needed.
        calibration: data of the same kind that the network was not trained on; no targets are needed. p-values then
            hold for new inputs. At least 40 examples are needed. Without it, training examples that were not used for
            the fit are taken. Then more new inputs are flagged than the level says if the network is a classifier, and
            a warning says so.
        num_examples: largest number of training examples. They are spread evenly over a tensor or a data set. Of a
            list or another iterable they are the first, so its examples should come in random order.
        logits: whether the outputs are logits of classes, (N, K) or (N, K, ...). By default they are if K is 3 or more.
        seed: which examples are used for what.
        inputs: where the inputs are in a batch, if they are not first: a key, a position or a function.
        output: which output counts, if the network returns several.

    >>> network = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).eval()
    >>> detector = novelty(network, torch.randn(400, 2, generator=generator(0)))
    >>> detector.p_value(torch.tensor([[0.1, -0.2], [9.0, 9.0]])) < 0.05
    tensor([False,  True])
    """
    num_examples, seed = whole_number("num_examples", num_examples, FEWEST), whole_number("seed", seed, least=None)
    for data, what in ((batches, "training"), (calibration, "calibration")):
        if (count := known_length(data, inputs)) is not None and count < FEWEST:
            raise _too_few(count, what)
    sight, statistics, logit_rows = _collect(as_network(model, output), batches, num_examples, logits, inputs)
    fit, ordinary, rest = _split(len(statistics), calibration is not None, seed)
    gaussian = fit_gaussian(statistics[fit], predicted_classes(logit_rows[fit]), max(1, logit_rows.shape[1]))
    nothing = torch.empty(0)
    detector = Novelty(sight, gaussian, nothing, nothing, nothing, calibration is not None)
    parts, sites = detector.parts(statistics[ordinary], logit_rows[ordinary])
    if parts[:, 1:2].numel() and parts[:, 1].abs().max() < NO_ENERGY:
        warn(
            "the outputs of the network are log-probabilities, it seems. Their energy is 0 for all inputs, so the "
            "novelty does without it. Let the network return logits to use it."
        )
        parts[:, 1] = MOST  # so no energy is a surprise
    detector = replace(detector, ordinary_parts=parts, ordinary_sites=sites)
    if calibration is None:
        if logit_rows.shape[1]:
            warn(
                "the p-values are calibrated on training examples, which a classifier knows better than new ones: it "
                "may flag two or three times as many new inputs as the level says. Pass data that the network was not "
                "trained on as calibration=; no targets are needed."
            )
        scores = _score(parts, detector.parts(statistics[rest], logit_rows[rest])[0])
    else:
        scores = detector.score(calibration, inputs=inputs)
        if len(scores) < FEWEST:
            raise _too_few(len(scores), "calibration")
    return replace(detector, calibration_scores=scores)


def _collect(
    network: Network, batches: Batches, num_examples: int, logits: bool | None, picker: Picker
) -> tuple[Sight, Tensor, Tensor]:
    """Return how the network is watched, and the statistics (n, D) and logits (n, K) of the training examples."""
    stream = input_stream(batches, picker)
    first = first_of(stream)
    sight = watch(network, first[:2].to(network.device), logits)
    num_examples = min(num_examples, max(FEWEST, NUMBERS // sight.size))
    all_inputs = chain([first], stream) if hasattr(batches, "__next__") else evenly(batches, num_examples, picker)
    found: list[tuple[Tensor, Tensor]] = []
    count = 0
    for chunk in (chunk for inputs in all_inputs for chunk in cut(inputs, None, CHUNK)):
        if count >= num_examples:
            break
        statistics, rows = sight(chunk[: num_examples - count])
        require_finite(statistics, "the statistics of the training examples")
        found.append((statistics, require_finite(rows, "the outputs for the training examples")))
        count += len(rows)
    if count < FEWEST:
        raise _too_few(count, "training")
    return sight, torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found])


def _too_few(count: int, what: str) -> BatchbayesError:
    expected = f"at least {FEWEST} {what} examples, so that a p-value can be small"
    return BatchbayesError(expected=expected, got=f"{count}", fix="pass more data")


def _split(count: int, held_out: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows for the fit, for the ranks of the parts and for p-values: 1/2, 1/4 and 1/4, or 3/4, 1/4 and none."""
    rows = torch.randperm(count, generator=generator(seed, "novelty"))
    quarter = count // 4
    last = count - (0 if held_out else quarter)
    return rows[: last - quarter], rows[last - quarter : last], rows[last:]


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the predicted class of each example. Without logits all are of one class."""
    return logits.argmax(1) if logits.shape[1] else logits.new_zeros(logits.shape[0], dtype=torch.long)


def _score(ordinary: Tensor, parts: Tensor) -> Tensor:
    """Return the surprise of the distance plus the mean surprise of the other parts."""
    found = surprise(ordinary, parts)
    return found[:, 0] if found.shape[1] == 1 else found[:, 0] + found[:, 1:].mean(1)
