r"""Monte Carlo batch normalisation.

What is random: the statistics by which every batch-norm layer normalises, all layers jointly.
q(omega): the empirical distribution of the statistics of R training mini-batches of M examples.
Cost: fitting is R + 2 forward passes of M examples; a draw is one row. When the linear engine is first asked for, R
passes of at most 32 examples show how far each row moves the outputs.
Reference: Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks", ICML 2018.
Where we differ: each draw is used for all test inputs. Each input has the same predictive as in the paper, at less
cost. The default centre is the network's own running statistics, which keeps the network's answer and takes only the
spread from the batches; `center="batches"` is the paper.

MCBN with the query inside its own batch: the exact predictive, for research.

What is random: the M - 1 training examples that share a batch with the query.
q(omega): for each query x, the statistics of the batch {x} and its companions, so omega depends on x.
Cost: fitting keeps R companion batches; a draw runs M examples for each query, M times the cost of plain MCBN.
Reference: the predictive of Atanov et al., "Uncertainty Estimation via Stochastic Batch Normalization", 2018.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from batchbayes._common.rng import dealt
from batchbayes._common.signatures import checked
from batchbayes._common.text import count
from batchbayes.errors import BatchbayesError
from batchbayes.methods.batchnorm.omega import by_batch
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import (
    IDLE,
    SITES,
    Select,
    Site,
    refusing,
    require_present,
)
from batchbayes.methods.batchnorm.statistics import FitOptions, MiniBatchOptions, fit_rows, prepare
from batchbayes.network.function import Function, Network, Output
from batchbayes.network.inputs import Picker, Whole, require_finite
from batchbayes.network.source import Batches
from batchbayes.posterior import Posterior
from batchbayes.state import coded


@overload
def mcbn(
    model: nn.Module, batches: Batches, *, include_query: Literal[True], **options: Unpack[MiniBatchOptions]
) -> "QueryInBatchPosterior": ...
@overload
def mcbn(
    model: nn.Module, batches: Batches, *, include_query: Literal[False] = False, **options: Unpack[FitOptions]
) -> BatchNormPosterior: ...
@checked
def mcbn(  # pyright: ignore[reportInconsistentOverload]
    model: nn.Module,
    batches: Batches,
    *,
    num_samples: int = 64,
    seed: int = 0,
    center: Center | None = None,
    batch_size: int | None = None,
    training_batch_size: int | None = None,
    sites: Select = None,
    dropout: bool = False,
    include_query: bool = False,
    inputs: Picker = None,
    output: Output = None,
) -> "BatchNormPosterior | QueryInBatchPosterior":
    """Fit MCBN to a trained network: gather the statistics of training mini-batches.

    Args:
        model: any network with batch normalisation. It is not changed.
        batches: training data **with the training-time transforms**: a DataLoader, an iterable of x or (x, y), or a
            tensor, an array, a pair (x, y) or a Dataset, from which batches are drawn. A list or generator is read
            once, a loader repeatedly.
        num_samples: the number of mini-batches R; fewer if the data ends before. A prediction draws each
            row at most once: more draws than R would repeat them.
        seed: fixes the order of the data, and augmentations that use the global random generators.
        center: "running" scatters around the network's own running statistics, which keeps its mean answer; "batches"
            scatters around the mean of the batch statistics (the paper). By default "running", unless a layer has no
            running statistics.
        batch_size: M, by default that of the loader. Batches of another size are cut and joined to size M.
        training_batch_size: the batch size that the network was trained with. A warning says if M differs. Without it,
            nothing tells whether the draws are as wide as the noise of training.
        sites: which batch-norm layers are random: the first k, names or patterns such as "layer1.*", or a function
            of (name, layer). The other layers keep their running statistics.
        dropout: gather the statistics with dropout active, as in training. Prediction never uses dropout.
        include_query: predict each input inside a batch with M - 1 training examples. This is the predictive
            of Atanov et al. (2018) without approximation, M times as slow, for research.
        inputs: where the inputs are in a batch, if they are not first: a key, a position, several of them for a
            network with several inputs, or a function that returns a tensor, a tuple (arguments by position) or a dict
            (arguments by name).
        output: which output counts, if the network returns several: a key, an attribute, a position or a function.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    >>> posterior = mcbn(network, torch.randn(100, 2), batch_size=10, num_samples=32)
    >>> posterior
    BatchNormPosterior(mcbn on Sequential: 1 site, 16 statistics, 32 rows, batch size 10, centred on running)
    """
    if include_query and (center == "running" or dropout):
        raise BatchbayesError(
            expected='center="batches" and no dropout with include_query=True',
            got=f"center={center!r}, dropout={dropout}",
            fix="leave these out: each query is normalised by its own batch",
        )
    prepared = prepare(
        model,
        batches,
        num_samples=num_samples,
        seed=seed,
        batch_size=batch_size,
        training_batch_size=training_batch_size,
        sites=sites,
        inputs=inputs,
        output=output,
    )
    if include_query:
        if isinstance(prepared.first, Whole):
            raise BatchbayesError("rows of examples for include_query=True", f"{prepared.first}", "leave it out")
        companions = torch.stack([batch[1:] for batch in prepared.stream])  # (R, M - 1, ...)

        return QueryInBatchPosterior(prepared.network, prepared.sites, companions, prepared.idle)
    return fit_rows(prepared, "mcbn", center, dropout)


@dataclass(frozen=True, eq=False)
class QueryInBatchPosterior(Posterior):
    """Functions that differ in the training examples that each query is normalised with."""

    kind: ClassVar[str] = "batchnorm-query"

    network: Network
    sites: tuple[Site, ...] = field(metadata=coded(SITES))
    companions: Tensor
    """Training inputs, (R, M - 1, ...)."""
    idle: tuple[str, ...] = field(metadata=coded(IDLE), default=())
    """Layers without statistics, which no example may reach."""

    @property
    def batch_size(self) -> float:
        """M: the query and its companions."""
        return float(self.companions.shape[1] + 1)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(mcbn on {self.network}: {count(len(self.sites), 'site')}, "
            f"{len(self.companions)} batches, batch size {self.batch_size:g}, the query inside)"
        )

    def draw(self, seed: int, index: int) -> Function:
        """Return the network as each query sees it among the companions of draw `index`."""
        require_present(self.network, self.sites)
        companions = self.companions[dealt(seed, index, len(self.companions))]
        tensors, before = by_batch(self.sites), refusing(self.idle)

        def drawn(inputs: Tensor) -> Tensor:
            others = companions.to(inputs)
            batches = (torch.cat([query[None], others]) for query in inputs)
            return torch.stack([self.network(batch, tensors=tensors, before=before)[0] for batch in batches])

        return drawn

    def require_sound(self) -> None:
        companions = self.companions
        if companions.ndim < 3 or not companions.shape[0] or not companions.shape[1]:
            raise ValueError(f"companions of shape {tuple(companions.shape)}")
        require_finite(companions, "the companions")
