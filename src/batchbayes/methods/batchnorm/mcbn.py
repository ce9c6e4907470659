r"""Monte Carlo batch normalisation.

What is random: the statistics by which every batch-norm layer normalises, all layers jointly.
q(omega): the empirical distribution of the statistics of R training mini-batches of M examples.
Cost: fitting is R forward passes of M examples, and R of at most 32 examples that show how far each row moves the
outputs; a draw is one row.
Reference: Teye, Azizpour, Smith, "Bayesian Uncertainty Estimation for Batch Normalized Deep Networks", ICML 2018.
Where we differ: each draw is used for all test inputs. Each input has the same predictive as in the paper, at less
cost. The centre may be the network's own running statistics; this keeps the network's answer and takes only the spread
from the batches.
"""

from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch
from torch import nn

from batchbayes.batches import Batches
from batchbayes.errors import BatchbayesError
from batchbayes.inputs import Picker
from batchbayes.methods.batchnorm.fit import FitOptions, MiniBatchOptions, fit_rows, prepare, require_center
from batchbayes.methods.batchnorm.posterior import BatchNormPosterior, Center
from batchbayes.methods.batchnorm.sites import Select
from batchbayes.network import Output

if TYPE_CHECKING:
    from batchbayes.methods.batchnorm.query import QueryInBatchPosterior


@overload
def mcbn(
    model: nn.Module, batches: Batches, *, include_query: Literal[True], **options: Unpack[MiniBatchOptions]
) -> "QueryInBatchPosterior": ...
@overload
def mcbn(
    model: nn.Module, batches: Batches, *, include_query: Literal[False] = False, **options: Unpack[FitOptions]
) -> BatchNormPosterior: ...
def mcbn(  # pyright: ignore[reportInconsistentOverload]
    model: nn.Module,
    batches: Batches,
    *,
    num_samples: int = 64,
    seed: int = 0,
    center: Center = "batches",
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
        num_samples: the number of mini-batches R; fewer if the data ends before. If a prediction makes more draws
            than R, rows are used again.
        seed: fixes the order of the data, and augmentations that use the global random generators.
        center: "batches" scatters around the mean of the batch statistics (the paper); "running" scatters around the
            network's own running statistics, which keeps its mean answer.
        batch_size: M, by default that of the loader. Batches of another size are cut and joined to size M.
        training_batch_size: the batch size that the network was trained with. A warning says if M differs.
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
    BatchNormPosterior(mcbn on Sequential: 1 site, 16 statistics, 32 rows, batch size 10, centred on batches)
    """
    require_center(center)
    if include_query and (center != "batches" or dropout):
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
        companions = torch.stack([batch[1:] for batch in prepared.stream])  # (R, M - 1, ...)
        from batchbayes.methods.batchnorm.query import QueryInBatchPosterior

        return QueryInBatchPosterior(prepared.network, prepared.sites, companions, prepared.idle)
    return fit_rows(prepared, "mcbn", center, dropout)[1]
