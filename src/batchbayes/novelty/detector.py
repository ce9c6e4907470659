r"""Novelty: has the network seen such an input?

A forward pass answers two questions about each input. *Does it look like the training data?* The answer is the
Mahalanobis distance of its statistics at all layers that are watched (see `statistics.py`) from those of training
examples of the class that the network predicts. *Does it look like any class?* There are three
answers: how much more likely the known classes make its statistics than one common class does, the same for its last
features, and the same again if the common class is as wide as all of them together (`LastFeatures` in `scores.py`).

Each answer becomes a surprise, $-\log p$ among examples that were not used for the fit. The score is the mean surprise
of the second question, plus $\log(1 + 1 / (e p))$ for the first one. That is Fisher's sum of surprises, except that an
everyday distance says nothing: of two inputs with ordinary distances, the one that looks less like a class is the
stranger one. So one question cannot hide what the other one sees.

**What the training examples can support.** With fewer than one example for five statistics, the distance is that of the
means over the channels of each layer: three numbers a layer. With fewer than ten examples for a class, classes have no
centres, and the generalised entropy of the probabilities answers the second question. A classifier that does not end in
a linear layer has no last features. There the energy of the logits, $-\log \sum_k e^{f_k}$ (Liu et al., NeurIPS 2020),
and the first of the three answers have to do.

The p-value of the score is conformal: at most a share a of ordinary inputs has a p-value of a or less, if ordinary
inputs are like the examples that it is calibrated on. **A classifier knows its training examples better than new ones
of the same kind.** So pass data that the network was not trained on as `calibration`, to get p-values that hold for new
inputs. Calibrated on training examples that were not used for the fit, two public networks flagged 1.3 to 3.5 times as
many new images as the level says (docs/results/novelty.md), and a warning says so.

A batch that was prepared in a wrong way is told of as a whole (`whole.py`). Novelty is not uncertainty. It says little
about errors on ordinary inputs, and little about new classes that look like the known ones.
"""

import numbers
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from batchbayes._common import text
from batchbayes._common.checks import whole_number
from batchbayes._common.rng import generator
from batchbayes.errors import BatchbayesError, warn
from batchbayes.network.function import Network, as_network
from batchbayes.network.inputs import Picker, require_finite, tensors_of
from batchbayes.network.source import Batches, Source, cut
from batchbayes.novelty.scores import (
    ClassGaussian,
    LastFeatures,
    conformal_p_value,
    fit_gaussian,
    fit_last_features,
    generalised_entropy,
    surprise,
)
from batchbayes.novelty.statistics import CHUNK, Sight, layer_means, watch_any
from batchbayes.novelty.whole import (
    LEAST,
    BatchReport,
    Looked,
    OrdinaryBatches,
    fit_whole,
    joined,
    properties,
)
from batchbayes.state import Codec, Saved, coded, nested

NUMBERS = 2**26
"""Statistics that are kept during the fit (256 MiB; the fit makes a few copies). A network with very many channels is
fitted to fewer examples, for example a ResNet-50 to some 800."""
MOST = 1e12
"""Parts of a score are clipped here, so that an infinite output gives a finite score."""
NO_ENERGY = 0.01
"""The energy of log-probabilities is zero. In half precision it is rounded by less than this."""
FEWEST = 40
"""Training examples. With fewer, no p-value could be small."""
UNITS = 64
"""Training examples that the units of layers without running statistics are measured on."""
FINE, LAYER_SHRINKAGE = 5, 0.01
"""Statistics for each example of the fit, at most, for a distance of single channels; shrinkage of that of layers."""
FEWEST_OF_CLASS = 10
"""Examples of the fit for each class, on average, that centres of classes need."""

EVERYDAY = 1.0
"""A distance with a surprise below this, so with a p-value above 1/e, hardly counts."""


@dataclass(frozen=True, eq=False)
class NoveltyReport:
    """What one forward pass says about each of N inputs."""

    score: Tensor
    """How unusual the input is, (N,). Higher is more unusual."""
    p_value: Tensor
    """Share of ordinary inputs that are at least as unusual, (N,)."""
    site: tuple[str, ...]
    """The name of the layer where the input is most unusual."""
    site_p_value: Tensor
    """How unusual the input is at that layer, (N,): the p-value of the layer alone, not corrected for the choice of
    the most unusual layer. Far from ordinary values it is an extrapolation, so it can be extremely small."""
    batch: BatchReport | None = None
    """What is said of all inputs together, if there are 16 or more. `print` it for the words."""


_COARSE = Codec(
    lambda coarse, _: ({"coarse": coarse is not None}, {}),
    lambda file: (whole := file.known["whole"]) and (whole.layers.gaussian if file.header["coarse"] else None),
)


@dataclass(frozen=True, eq=False)
class Novelty(Saved):
    """A fitted detector of unusual inputs. Any number of threads may use it at once."""

    kind: ClassVar[str] = "novelty"
    sight: Sight = field(metadata=coded(nested(Sight)))
    gaussian: ClassGaussian = field(metadata=coded(nested(ClassGaussian)))
    ordinary_parts: Tensor
    """The parts of the score for training examples that were not used for the fit, (n, 1 to 4)."""
    ordinary_sites: Tensor
    """Distances at each site for the same examples, (n, sites)."""
    calibration_scores: Tensor
    """Scores of the examples that p-values are calibrated on, (m,)."""
    held_out: bool
    """Whether those are data that the network was not trained on."""
    whole: OrdinaryBatches | None = field(metadata=coded(nested(OrdinaryBatches, "whole.")), default=None)
    """Ordinary examples to compare batches with. Files of older versions have none."""
    coarse: ClassGaussian | None = field(metadata=coded(_COARSE), default=None)
    """Describes the mean statistics of each layer, if examples were too few for a distance of all statistics."""
    features: LastFeatures | None = field(metadata=coded(nested(LastFeatures, "features.", "features.")), default=None)
    """Describes the last features by class, if there are any and examples are enough."""
    everyday: float | None = None
    """Files of older versions have None: their score is the plain sum of surprises."""

    @property
    def network(self) -> Network:
        """The network that is watched. A file has a fingerprint of its weights."""
        return self.sight.network

    def report(
        self, data: Batches, *, inputs: Picker = None, chunk_size: int | None = None, whole: bool = True
    ) -> NoveltyReport:
        """Return score, p-value and most unusual layer of each input, from one forward pass.

        Args:
            data: a tensor (N, ...), or an iterable of batches such as a DataLoader.
            inputs: where the inputs are in a batch, if they are not first: a key, a position or a function.
            chunk_size: examples in one forward pass.
            whole: whether 16 inputs or more are also judged together. A warning tells of batches that were prepared in
                another way than the data of the fit, as with pixels of another scale.
        """
        report, looked = self._report(data, inputs, chunk_size)
        if not whole or self.whole is None or len(report.score) < LEAST:
            return report
        batch = self.whole.report(looked)
        if batch.is_unusual:
            warn(f"novelty: {batch}")
        return replace(report, batch=batch)

    def _report(self, data: Batches, picker: Picker, chunk_size: int | None) -> tuple[NoveltyReport, Looked]:
        self.sight.warn_if_changed()
        source = Source(data, picker, usual=self.network.inputs, for_prediction=True)
        found = [
            (self.parts(*self.sight(chunk)), properties(chunk))
            for chunk in source.chunks(chunk_size, numbers=CHUNK)
            if len(chunk)
        ]
        if not found:
            raise BatchbayesError(expected="at least one example", got="none", fix="check the data")
        parts, sites = torch.cat([own[0] for own, _ in found]), torch.cat([own[1] for own, _ in found])
        looked = joined([own[2]._replace(names=names, inputs=looks) for own, (names, looks) in found])
        score, p_value = self.judged(parts)
        at_site, site = surprise(self.ordinary_sites, sites).max(1)
        names = tuple(self.sight.places[index].name for index in site.tolist())
        return NoveltyReport(score, p_value, names, (-at_site).exp()), looked

    def judged(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and p-values (N,) from the parts of the score, (N, 1 to 4). A file computes the same."""
        score = self.sum_of(surprise(self.ordinary_parts, parts))
        return score, conformal_p_value(self.calibration_scores, score)

    def parts(self, statistics: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Looked]:
        """Return distance and class parts (N, 1 to 4), as far as there are logits, distances by site, and the layers.

        The class parts are the evidence of all statistics and the parts of the last features, else energy and that
        evidence, or generalised entropy if classes have no centres.
        """
        z, known = self.gaussian.standardise(statistics), len(self.gaussian.centres)
        classes = predicted_classes(logits)
        distance, evidence = self.gaussian.distances(z, classes if known > 1 else torch.zeros_like(classes))
        means = layer_means(self.sight.places, z)
        if self.coarse is not None:
            distance, _ = self.coarse.distances(self.coarse.standardise(means), torch.zeros_like(classes))
        energy = -logits.logsumexp(1).nan_to_num(nan=-torch.inf)
        of_classes = [energy, evidence][: logits.shape[1]]
        if self.features is not None:
            of_classes = [evidence, *self.features.parts(statistics[:, -self.sight.num_features :], classes)]
        elif known < logits.shape[1]:
            of_classes = [generalised_entropy(logits).nan_to_num(nan=MOST)]
        by_site = z.split([place.size for place in self.sight.places], dim=1)
        sites = torch.stack([part.square().mean(1) for part in by_site], 1)
        energy = energy.clamp(-MOST, MOST) if logits.shape[1] else torch.zeros_like(distance)
        return (
            torch.stack([distance, *of_classes], 1).clamp(max=MOST),
            sites,
            Looked(means, energy, classes, means[:, :0]),
        )

    def sum_of(self, surprises: Tensor) -> Tensor:
        """Return the score (N,) from the surprises of the parts (N, 1 to 4): that of the distance, then of classes."""
        distance = surprises[:, 0]
        if surprises.shape[1] == 1:
            return distance
        if self.everyday is not None:
            beyond = distance - self.everyday  # onnxruntime has no softplus in float64
            distance = beyond.clamp_min(0) + (1 + (-beyond.abs()).exp()).log()
        return distance + surprises[:, 1:].mean(1)

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

    def require_sound(self) -> None:
        mean, std, centres = self.gaussian.mean, self.gaussian.std, self.gaussian.centres
        if not mean.shape == std.shape == centres[0].shape == (self.sight.size,):
            raise ValueError(f"a mean of shape {tuple(mean.shape)} for {self.sight.size} statistics")

    def __repr__(self) -> str:
        source = "held-out" if self.held_out else "training"
        return (
            f"Novelty({self.sight.network}: {text.count(len(self.sight.places), 'site')}, "
            f"{self.sight.size} statistics{', in means' if self.coarse else ''}, "
            f"calibrated on {len(self.calibration_scores)} {source} examples)"
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
        model: a trained network. It is left as it is. Batch norms are watched if there are any, else norms of other
            kinds, else linear layers and convolutions.
        batches: training data as it looks at prediction time: without random crops, flips or noise. At least 40
            examples are needed.
        calibration: data of the same kind that the network was not trained on; no targets are needed. p-values then
            hold for new inputs. At least 40 examples are needed. Without it, training examples that were not used for
            the fit are taken. Then more new inputs are flagged than the level says if the network is a classifier, and
            a warning says so.
        num_examples: largest number of training examples. They are spread evenly over the data.
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
    source = Source(batches, inputs)
    for data, what in ((source, "training"), (Source(calibration, inputs), "calibration")):
        if (count := data.num_examples) is not None and count < FEWEST:
            raise _too_few(count, what)
    sight, statistics, logit_rows, looks = _collect(as_network(model, output, inputs), source, num_examples, logits)
    fit, ordinary, rest = _split(len(statistics), calibration is not None, seed)
    detector, layers = _fitted(sight, statistics[fit], logit_rows[fit], calibration is not None)
    parts, sites, _ = detector.parts(statistics[ordinary], logit_rows[ordinary])
    has_energy = detector.features is None and len(detector.gaussian.centres) == logit_rows.shape[1]
    if has_energy and parts[:, 1].abs().max() < NO_ENERGY:
        warn(
            "the outputs of the network are log-probabilities, it seems. Their energy is 0 for all inputs, so the "
            "novelty does without it. Let the network return logits to use it."
        )
        parts[:, 1] = MOST  # so no energy is a surprise
    detector = replace(detector, ordinary_parts=parts, ordinary_sites=sites)

    def looked(rows: Tensor) -> Looked:
        found = detector.parts(statistics[rows], logit_rows[rows])[2]
        return found._replace(names=looks[0], inputs=looks[1][rows])

    if calibration is None:
        if logit_rows.shape[1]:
            warn(
                "the p-values are calibrated on training examples, which a classifier knows better than new ones: it "
                "may flag two or three times as many new inputs as the level says. Pass data that the network was not "
                "trained on as calibration=; no targets are needed."
            )
        scores = detector.sum_of(surprise(parts, detector.parts(statistics[rest], logit_rows[rest])[0]))
        usual = looked(rest)
    else:
        report, usual = replace(detector, calibration_scores=torch.zeros(1))._report(calibration, inputs, None)
        scores = report.score
        if len(scores) < FEWEST:
            raise _too_few(len(scores), "calibration")
    whole = fit_whole(layers, looked(fit), usual, max(1, logit_rows.shape[1]), seed)
    return replace(detector, calibration_scores=scores, whole=whole)


def _fitted(sight: Sight, statistics: Tensor, logits: Tensor, held_out: bool) -> tuple[Novelty, ClassGaussian]:
    """Fit the distances to what the examples (n, ...) can support. Also return that of the means of layers."""
    count, classes, num_classes = len(statistics), predicted_classes(logits), max(1, logits.shape[1])
    features = None
    if count < FEWEST_OF_CLASS * num_classes:
        classes, num_classes = torch.zeros_like(classes), 1
    elif sight.last:
        features = fit_last_features(statistics[:, -sight.num_features :], classes, num_classes)
    is_coarse = sight.size > FINE * count
    gaussian = fit_gaussian(
        statistics, classes, num_classes, most_directions=1 if is_coarse and num_classes == 1 else None
    )
    means = layer_means(sight.places, gaussian.standardise(statistics))
    if is_coarse and count < 2 * means.shape[1]:
        warn(
            f"{count} examples are few for a network with {text.count(len(sight.places), 'layer')} that are watched: "
            f"the novelty may miss what more would show. Pass at least {4 * means.shape[1]} training examples."
        )
    layers = fit_gaussian(means, torch.zeros_like(classes), 1, LAYER_SHRINKAGE)
    nothing = torch.empty(0)
    scores, coarse = (nothing, nothing, nothing), layers if is_coarse else None
    found = Novelty(sight, gaussian, *scores, held_out, coarse=coarse, features=features, everyday=EVERYDAY)
    return found, layers


def _collect(
    network: Network, source: Source, num_examples: int, logits: bool | None
) -> tuple[Sight, Tensor, Tensor, tuple[tuple[str, ...], Tensor]]:
    """Return how the network is watched, and statistics (n, D), logits (n, K) and properties of the training inputs."""
    head = source.head(UNITS)
    forms = [[tensor.shape[1:] for tensor in tensors_of(batch)] for batch in head]
    alike = torch.cat([batch for batch, form in zip(head, forms, strict=True) if form == forms[0]])
    sight = watch_any(network, alike[:UNITS].to(network.device), logits)
    num_examples = min(num_examples, max(FEWEST, NUMBERS // sight.size))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    names: tuple[str, ...] = ()
    for part in (part for inputs, _ in source.evenly(num_examples) for part in cut(inputs, None, CHUNK)):
        names, looks = properties(part)
        found.append((*sight(part), looks))
    statistics, rows, looks = (torch.cat(column) for column in zip(*found, strict=True))
    require_finite(statistics, "the statistics of the training examples")
    require_finite(rows, "the outputs for the training examples")
    if len(rows) < FEWEST:
        raise _too_few(len(rows), "training")
    return sight, statistics, rows, (names, looks)


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
