"""Tables and figures of stochastic batch normalisation, beside the published ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchbayes.metrics import ood_auroc
from batchbayes.tools import Figure
from batchbayes_papers.runner.experiment import Results, Unit
from batchbayes_papers.runner.figures import EntropyPanel, entropy_figure
from batchbayes_papers.runner.records import unpack_tensors
from batchbayes_papers.runner.tables import CellValue, ResultTable
from batchbayes_papers.sbn.networks import (
    DROPOUT,
    DROPOUT_SBN,
    ENSEMBLE,
    ENSEMBLE_SBN,
    LENET,
    NETWORK,
    RESNET,
    SBN,
    UNKNOWN,
    VARIANTS,
    VGG,
    Probabilities,
)

PUBLISHED = {
    LENET: {SBN: (0.53, 0.025), ENSEMBLE: (0.43, 0.015), ENSEMBLE_SBN: (0.43, 0.014), DROPOUT: (0.51, 0.016),
            DROPOUT_SBN: (0.49, 0.015)},
    VGG: {SBN: (5.76, 0.302), ENSEMBLE: (5.18, 0.177), ENSEMBLE_SBN: (5.23, 0.154), DROPOUT: (5.32, 0.155),
          DROPOUT_SBN: (5.38, 0.149)},
    RESNET: {SBN: (4.35, 0.255), ENSEMBLE: (3.37, 0.138), ENSEMBLE_SBN: (3.34, 0.110)},
}  # fmt: skip
"""Table 1: error in per cent, and NLL."""
PUBLISHED_CODE = {
    LENET: {ENSEMBLE: (0.40, 0.016), ENSEMBLE_SBN: (0.40, 0.015), DROPOUT: (0.42, 0.014), DROPOUT_SBN: (0.42, 0.014)},
    VGG: {ENSEMBLE: (4.81, 0.191), ENSEMBLE_SBN: (4.81, 0.162)},
    RESNET: {},
}
"""The same table in the authors' public code, where it differs."""
READINGS = {
    LENET: ((0.5, 1.0), {SBN: (0.81, 0.975), ENSEMBLE: (0.46, 0.82), ENSEMBLE_SBN: (0.45, 0.81),
                         DROPOUT: (0.40, 0.735), DROPOUT_SBN: (0.375, 0.715)}),
    VGG: ((0.4, 0.8), {SBN: (0.77, 0.95), ENSEMBLE: (0.61, 0.87), ENSEMBLE_SBN: (0.565, 0.835), DROPOUT: (0.59, 0.85),
                       DROPOUT_SBN: (0.51, 0.79)}),
    RESNET: ((0.4, 0.8), {SBN: (0.79, 0.96), ENSEMBLE: (0.62, 0.88), ENSEMBLE_SBN: (0.58, 0.845)}),
}  # fmt: skip
"""Two entropies for each network, and the shares of unknown images below them, read off the published figures."""
PAIRS = ((NETWORK, SBN), (ENSEMBLE, ENSEMBLE_SBN), (DROPOUT, DROPOUT_SBN))
METHODS = tuple(method for pair in PAIRS for method in pair)


class NetworkResults:
    """The predictions of all finished units of one network."""

    def __init__(self, name: str, units: Sequence[Unit], results: Results) -> None:
        self.labels = torch.empty(0, dtype=torch.long)
        self.methods: dict[str, list[Probabilities]] = {}
        """In the order of the tables. A method has one entry for each trained network, and an ensemble has one."""
        self.variants: dict[str, Probabilities] = {}
        self.novelty: float | None = None
        for unit in units:
            step = unit.arguments["step"]
            if unit.arguments["network"] != name or step == "training" or unit.name not in results:
                continue
            found = results[unit.name]
            self.labels = unpack_tensors(found["labels"])["labels"].long()
            for method, text in found["methods"].items():
                tensors = unpack_tensors(text)
                pair = tensors["known"].double(), tensors["unknown"].double()
                if step == "variants":
                    self.variants[method], self.novelty = pair, found["novelty"]
                else:
                    self.methods.setdefault(method, []).append(pair)
        for single, together in ((NETWORK, ENSEMBLE), (SBN, ENSEMBLE_SBN)):
            members = self.methods.get(single, [])
            if len(members) > 1:
                known, unknown = (torch.stack(part).mean(0) for part in zip(*members, strict=True))
                self.methods[together] = [(known, unknown)]
        self.methods = {method: self.methods[method] for method in METHODS if method in self.methods}


def error_percent(known: Tensor, labels: Tensor) -> float:
    """Return the share of wrong classes, in per cent."""
    return 100 * float((known.argmax(-1) != labels).double().mean())


def losses(known: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of each image, (N,)."""
    return -known.clamp_min(1e-12).log().gather(-1, labels[:, None])[:, 0]


def entropies(probs: Tensor) -> Tensor:
    """Return the entropy of each row, (N,), in nats."""
    return -(probs * probs.clamp_min(1e-12).log()).sum(-1)


def area_under_ecdf(probs: Tensor) -> float:
    """Return the area under the ECDF of the entropy, as a share of its range. Lower is better for unknown images.

    >>> area_under_ecdf(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).double())
    0.5
    """
    return 1 - float(entropies(probs).mean()) / math.log(probs.shape[-1])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def sbn_tables(config: Any, units: Sequence[Unit], results: Results) -> list[ResultTable]:
    """Return table 1, the pairs without and with SBN, the readings of the figures, and the variants."""
    every = {name: NetworkResults(name, units, results) for name in config.datasets}
    return [_table_one(every), _pairs(every), _readings(every), _variants(every)]


def _table_one(every: Mapping[str, NetworkResults]) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for name, seen in every.items():
        for method, pairs in seen.methods.items():
            errors = [error_percent(known, seen.labels) for known, _ in pairs]
            nll = [float(losses(known, seen.labels).mean()) for known, _ in pairs]
            paper, code = PUBLISHED[name].get(method, (None, None)), PUBLISHED_CODE[name].get(method, (None, None))
            rows.append((name, method, _mean(errors), paper[0], code[0], _mean(nll), paper[1], code[1]))
    return ResultTable(
        "Table 1: known classes",
        ("network", "method", "error %", "paper", "code", "NLL", "NLL, paper", "NLL, code"),
        tuple(rows),
        ("", "", ".2f", ".2f", ".2f", ".4f", ".3f", ".3f"),
        ("Single networks: means over all members. Code: what the authors' repository prints, where it differs.",),
    )


def _pairs(every: Mapping[str, NetworkResults]) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for name, seen in every.items():
        for host, noisy in PAIRS:
            if noisy in seen.methods:
                both = list(zip(seen.methods[host], seen.methods[noisy], strict=True))
                gaps = [losses(b[0], seen.labels) - losses(a[0], seen.labels) for a, b in both]
                gap = torch.stack(gaps).mean(0)  # (N,)
                paper = PUBLISHED[name]
                published = paper[noisy][1] - paper[host][1] if host in paper else None
                error = float(gap.std() / len(gap) ** 0.5)
                lower = [area_under_ecdf(b[1]) - area_under_ecdf(a[1]) for a, b in both]
                rows.append((name, host, float(gap.mean()), error, published, _mean(lower)))
    return ResultTable(
        "What SBN does to its host",
        ("network", "host", "NLL", "standard error", "NLL, paper", "area under the ECDF"),
        tuple(rows),
        ("", "", "+.4f", ".4f", "+.3f", "+.4f"),
        ("Each is the value with SBN less that without. Negative is better. Standard errors are over images.",),
    )


def _readings(every: Mapping[str, NetworkResults]) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for name, seen in every.items():
        places, published = READINGS[name]
        for method, pairs in seen.methods.items():
            shares = [
                _mean([float((entropies(unknown) <= place).double().mean()) for _, unknown in pairs])
                for place in places
            ]
            paper = published.get(method, (None, None))
            area = _mean([area_under_ecdf(unknown) for _, unknown in pairs])
            rows.append((name, method, places[0], shares[0], paper[0], places[1], shares[1], paper[1], area))
    return ResultTable(
        "Unknown classes: the share of images with less entropy",
        ("network", "method", "entropy", "share", "paper", "and", "share ", "paper ", "area"),
        tuple(rows),
        ("", "", "", ".3f", ".3f", "", ".3f", ".3f", ".3f"),
        ("Low shares are good. Area: under the whole curve, as a share of the range of the entropy.",
         "The published values are read off figures, to about 0.01."),
    )  # fmt: skip


def _variants(every: Mapping[str, NetworkResults]) -> ResultTable:
    rows: list[tuple[CellValue, ...]] = []
    for name, seen in every.items():
        first = {method: seen.methods[method][0] for method in (NETWORK, SBN) if method in seen.methods}
        others = {method: seen.variants[method] for method in VARIANTS if method in seen.variants}
        for method, (known, unknown) in {**first, **others}.items():
            loss = losses(known, seen.labels)
            rows.append((
                name, method, error_percent(known, seen.labels), float(loss.mean()),
                float(loss.std() / len(loss) ** 0.5), area_under_ecdf(unknown),
                ood_auroc(entropies(known), entropies(unknown)),
            ))  # fmt: skip
        if seen.novelty is not None:
            rows.append((name, "novelty of one pass", None, None, None, None, seen.novelty))
    return ResultTable(
        "The first network of each kind: open choices, and methods beyond the paper",
        ("network", "method", "error %", "NLL", "standard error", "area", "AUROC"),
        tuple(rows),
        ("", "", ".2f", ".4f", ".4f", ".3f", ".3f"),
        ("AUROC: how well entropy, or novelty, tells unknown from known images.",),
    )


def sbn_figures(config: Any, units: Sequence[Unit], results: Results) -> dict[str, Figure]:
    """Draw the ECDF of the entropy of unknown images, one panel for each network."""
    panels = []
    for name in config.datasets:
        seen, (places, published) = NetworkResults(name, units, results), READINGS[name]
        curves = {method: entropies(pairs[0][1]).numpy() for method, pairs in seen.methods.items()}
        panels.append(EntropyPanel(f"{name} meets {UNKNOWN[name]}", curves, places, published))
    return {"entropy-of-unknown-images": entropy_figure(panels)}
