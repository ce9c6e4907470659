"""Prediction: S drawn functions on N examples, chunk by chunk, with running sums over the draws."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from batchbayes._common.checks import require_type, whole_number
from batchbayes._common.machine import keep_freed_memory
from batchbayes._common.progress import Progress
from batchbayes.engines.choose import Engine, EngineName, choose_engine
from batchbayes.engines.linear import Block, LinearDraws
from batchbayes.errors import BatchbayesError
from batchbayes.likelihoods import FEWEST_OUTPUTS, Bernoulli, Likelihood, require_likelihood
from batchbayes.network.function import require_default_device
from batchbayes.network.inputs import Picker, Whole
from batchbayes.network.replicas import one_call
from batchbayes.network.source import Batches, Source, cut
from batchbayes.outputs import side_by_side
from batchbayes.posterior import Posterior, num_draws, remembered

P = TypeVar("P")

KEPT_DRAWS_LIMIT = 2**24
"""If a predictive needs its draws later, they are kept by default up to this many numbers (64 MiB)."""
CHUNK = 2**20
"""Input numbers in one chunk. An engine may cut a chunk into several forward passes."""
SHARED_CHUNKS, SHARED_OUTPUTS = 8, 2**20
"""Largest number of chunks that share each draw, and about the largest number of outputs of the network in all."""
TRIED = 32
"""When a posterior is first used, a draw is called several times on this many examples, to see that it is a function
of each example alone."""


class Predicted(NamedTuple):
    """The prediction of one batch."""

    batch: Any
    """The batch as it came from the data, so that its targets are at hand."""
    predictives: Any
    """What each likelihood makes of the draws: a tuple, or a dict if likelihoods were given by name."""


class PredictOptions(TypedDict, total=False):
    """The options of `predict`."""

    num_samples: int | None
    seed: int
    engine: EngineName
    inputs: Picker
    chunk_size: int | None
    keep_draws: bool | None


@overload
def predict(posterior: Posterior, data: Batches, likelihood: Likelihood[P], **options: Unpack[PredictOptions]) -> P: ...
@overload
def predict(
    posterior: Posterior, data: Batches, likelihood: Mapping[Any, Any], **options: Unpack[PredictOptions]
) -> dict[Any, Any]: ...
def predict(  # pyright: ignore[reportInconsistentOverload]
    posterior: Posterior,
    data: Batches,
    likelihood: Any,
    *,
    num_samples: int | None = None,
    seed: int = 0,
    engine: EngineName = "sample",
    inputs: Picker = None,
    chunk_size: int | None = None,
    keep_draws: bool | None = None,
) -> Any:
    """Average the predictions of `num_samples` functions drawn from the posterior.

    Args:
        posterior: what functions are drawn from, for example the result of `mcbn(...)`.
        data: a tensor or an array (N, ...), a pair (x, y), a Dataset, or an iterable of batches: a DataLoader with or
            without targets. A warning says if the loader shuffles or drops its last batch, because the rows are then
            not those of the data set.
        likelihood: `categorical()`, `bernoulli()`, `gaussian(precision=...)` or `heteroscedastic_gaussian()`. For a
            network with several outputs, a dict of likelihoods by the name or position of the output, or of pairs
            (output, likelihood) by any name, where the output may be a function of what the network returns. All parts
            are of the same draws, made exactly.
        num_samples: the number of draws S, by default 64, or one for each function if there are few of them, as for an
            ensemble or MCBN. No function is drawn twice, and memory does not grow with S, unless the draws are kept.
        seed: draw s depends on the seed and on s alone.
        engine: "sample" runs the network once for each draw, which is exact. "linear" takes the network as linear in
            its batch statistics, so that any number of draws costs a few passes; a few exact draws check this, and a
            warning says if they differ. "auto" uses the linear engine if it costs less and exact draws show that it is
            good: then in at most 1 of 100 networks is the mean variance (for classes, the mutual information) more than
            20 % off, or its rank correlation with the exact one below 0.9. Else it uses the exact engine.
            `predictive.engine` says which engine was used, and why.
        inputs: where the inputs are in a batch: a key, a position, several of them, or a function, as in `mcbn`. By
            default they are where they were in the fit, or first.
        chunk_size: examples that are held in memory at once. By default a chunk has about a million numbers, and up to
            eight chunks share each draw, so that it need not be made again.
        keep_draws: keep the outputs of every draw as `predictive.draws` (S, N, ...). By default draws are kept only if
            the density of a regression needs them, and only while they are small.

    Returns:
        The predictive that the likelihood builds, on the CPU; a dict of them if there are several likelihoods.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    >>> posterior = bb.mcbn(network, torch.randn(256, 2), batch_size=32, num_samples=16)
    >>> predictive = bb.predict(posterior, torch.randn(5, 2), bb.categorical(), num_samples=16)
    >>> predictive.probs.shape, predictive.mutual_information.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """
    several = likelihood if isinstance(likelihood, Mapping) else (likelihood,)
    pass_over = _Pass(posterior, several, num_samples, seed, engine, chunk_size, keep_draws)
    source = pass_over.source(data, inputs)
    source.warn_if_shuffled()
    source.warn_if_dropping()
    pieces = [predicted.predictives for predicted in pass_over.run(source)]
    if not pieces:
        fix = "check the data; a generator can be read only once"
        raise BatchbayesError(expected="at least one example to predict", got="none", fix=fix)
    found = [joined(each) for each in zip(*pieces, strict=True)]
    return dict(zip(likelihood, found, strict=True)) if isinstance(likelihood, Mapping) else found[0]


def predict_stream(
    posterior: Posterior,
    data: Batches,
    likelihoods: Sequence[Likelihood[Any]] | Mapping[Any, Any],
    *,
    num_samples: int | None = None,
    seed: int = 0,
    engine: EngineName = "sample",
    inputs: Picker = None,
    chunk_size: int | None = None,
    keep_draws: bool | None = False,
) -> Iterator[Predicted]:
    """Predict batch by batch, for several likelihoods at once, so that the data may be of any size.

    The arguments are those of `predict`, and the numbers are the same. Draws are not kept unless `keep_draws` is True
    or None, so pass None to have the density of a regression. A tensor is cut into chunks, and each chunk is a batch.
    A dict of likelihoods is one for several outputs, as in `predict`.

    >>> import batchbayes as bb
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    >>> posterior = bb.mcbn(network, torch.randn(256, 2), batch_size=32, num_samples=16)
    >>> loader = [(torch.randn(5, 2), torch.zeros(5, dtype=torch.long)) for _ in range(3)]
    >>> for predicted in bb.predict_stream(posterior, loader, [bb.categorical(), bb.categorical(temperature=2.0)]):
    ...     _, labels = predicted.batch
    ...     plain, softened = predicted.predictives
    ...     assert plain.log_prob(labels).shape == (5,)
    """
    named = isinstance(likelihoods, Mapping)
    if not isinstance(likelihoods, list | tuple | Mapping) or not likelihoods:
        raise BatchbayesError(
            expected="a list of likelihoods", got=f"{likelihoods!r}"[:200], fix="pass [bb.categorical()], for example"
        )
    several = likelihoods if named else tuple(likelihoods)
    pass_over = _Pass(posterior, several, num_samples, seed, engine, chunk_size, keep_draws)
    for predicted in pass_over.run(pass_over.source(data, inputs)):
        found = predicted.predictives
        yield predicted._replace(predictives=dict(zip(likelihoods, found, strict=True))) if named else predicted
        pass_over.room = KEPT_DRAWS_LIMIT


class _Pass:
    """One pass over the data. The engine is chosen at the first chunk."""

    def __init__(
        self,
        posterior: Posterior,
        likelihoods: tuple[Likelihood[Any], ...] | Mapping[Any, Any],
        num_samples: int | None,
        seed: int,
        engine: EngineName,
        chunk_size: int | None,
        keep_draws: bool | None,
    ) -> None:
        require_default_device()
        require_posterior(posterior)
        if isinstance(likelihoods, Mapping):
            posterior, likelihoods = side_by_side(posterior, likelihoods, engine)
            engine = "sample"
        for likelihood in likelihoods:
            require_likelihood(likelihood)
        seed = whole_number("seed", seed, least=None)
        num_samples = None if num_samples is None else whole_number("num_samples", num_samples)
        if chunk_size is not None:
            chunk_size = whole_number("chunk_size", chunk_size)
        self._posterior, self._likelihoods, self._seed = posterior, likelihoods, seed
        self._num_samples = num_draws(posterior, num_samples)
        self._name: EngineName = engine
        self._probabilities = any(getattr(likelihood, "probabilities", None) for likelihood in likelihoods)
        self._chunk_size, self._keep_draws = chunk_size, keep_draws
        self._needs_draws = keep_draws is None and any(each.summary().needs_draws for each in likelihoods)
        self._contrasts = not keep_draws and all(likelihood.shift_invariant for likelihood in likelihoods)
        self._engine: Engine | None = None
        self._num_outputs = 0
        """Of each example, as the first chunk shows."""
        self._first = torch.empty(0)
        """The first outputs of one draw, if a likelihood is of yes or no."""
        self.room = KEPT_DRAWS_LIMIT
        """How many more numbers may be kept if `keep_draws` is None."""

    def source(self, data: Batches, picker: Picker) -> Source:
        """Return the data. Inputs are where they were in the fit, if nothing else is said."""
        usual = getattr(getattr(self._posterior, "network", None), "inputs", None)
        return Source(data, picker, usual=usual, for_prediction=True)

    @torch.no_grad()
    def run(self, source: Source) -> Iterator[Predicted]:
        keep_freed_memory()
        known = source.num_examples if source.is_rows or source.is_loader else None
        with Progress("predicting", known and known * self._num_samples) as shown:
            for batch, inputs in source.batches():
                chunks = [chunk for chunk in cut(inputs, self._chunk_size, CHUNK) if len(chunk)]
                each = self._predict_all(chunks, shown)
                if source.is_rows:
                    yield from (Predicted(chunk, found) for chunk, found in zip(chunks, each, strict=True))
                elif chunks:
                    yield Predicted(batch, tuple(map(joined, zip(*each, strict=True))))

    def _predict_all(self, chunks: Sequence[Any], shown: Progress) -> Iterator[tuple[Any, ...]]:
        """Yield what each likelihood makes of the draws on each chunk."""
        start = 0
        while start < len(chunks):
            together = chunks[start : start + self._most_chunks(len(chunks[start]))]
            yield from self._predict([chunk.to(self._posterior.device) for chunk in together], shown)
            start += len(together)

    def _most_chunks(self, chunk_size: int) -> int:
        """Return how many chunks are predicted together. The first is alone, because it shows how large outputs are."""
        is_free = self._chunk_size is None and not self._keep_draws and not self._needs_draws
        if self._engine is None or not self._engine.shares_draws or not is_free:
            return 1
        return max(1, min(SHARED_CHUNKS, SHARED_OUTPUTS // (chunk_size * self._num_outputs)))

    def _predict(self, chunks: Sequence[Any], shown: Progress) -> Iterator[tuple[Any, ...]]:
        """Yield what each likelihood makes of the draws on each of several chunks, which share each draw."""
        summaries = [[likelihood.summary() for likelihood in self._likelihoods] for _ in chunks]
        with one_call():
            if self._engine is None:
                require_functions(self._posterior, chunks[0])
                self._engine = self._choose(chunks[0])
            kept = self._sum_up(self._engine, chunks, summaries, shown)
        for own, blocks in zip(summaries, kept, strict=True):
            draws = _complete(blocks, self._num_samples)
            made = {"engine": self._engine.name, "drawn": self._engine.drawn}
            yield tuple(replace(summary.finish(draws), **made) for summary in own)

    def _sum_up(
        self, engine: Engine, chunks: Sequence[Any], summaries: Sequence[Sequence[Any]], shown: Progress
    ) -> list[list[Block]]:
        """Add the draws on each chunk to its summaries, and return those that are kept."""
        kept: list[list[Block]] = [[] for _ in chunks]
        begun: set[int] = set()
        for number, block in engine.blocks(chunks):
            if number not in begun:
                begun.add(number)
                self._check_first(block)
            for summary in summaries[number]:
                summary.add(block)
            self.room -= block.numel()
            if self._keep_draws or (self._needs_draws and self.room >= 0):
                kept[number].append(block)
            self._num_outputs = max(1, block.numel() // (len(block) * len(chunks[number])))
            shown.advance(len(block) * len(chunks[number]))
        return kept

    def _check_first(self, block: Block) -> None:
        """Check the first outputs of all chunks together: a few of them may lie between 0 and 1 by chance."""
        yes_or_no = [each for each in self._likelihoods if isinstance(each, Bernoulli)]
        if yes_or_no and self._first.numel() < FEWEST_OUTPUTS:
            outputs = block.middle if isinstance(block, LinearDraws) else block[0]
            self._first = torch.cat([self._first, outputs.flatten().float().cpu()])
            for likelihood in yes_or_no:
                likelihood.check_outputs(self._first)

    def _choose(self, chunk: Any) -> Engine:
        """Return the engine. Probabilities need the exact one: where they are taken as linear they leave 0 to 1."""
        name = self._name
        if self._probabilities and name == "linear" and not self._posterior.is_point:
            raise BatchbayesError(
                expected='engine="sample" or "auto" for outputs that are probabilities',
                got='engine="linear", by which they could leave the range from 0 to 1',
                fix="let the network return logits, or use one of the other engines",
            )
        name = "sample" if self._probabilities and name == "auto" else name
        return choose_engine(self._posterior, chunk, name, self._num_samples, self._seed, contrasts=self._contrasts)


def require_posterior(posterior: object) -> None:
    """Raise an error that says how to make a posterior if this is none."""
    fix = "pass the posterior as the first argument"
    if isinstance(posterior, nn.Module):
        fix = "fit first; for the network as it is, use bb.deterministic(model)"
    require_type(posterior, Posterior, expected="a posterior, as bb.mcbn(model, batches) returns it", fix=fix)


def require_functions(posterior: Posterior, inputs: Any) -> None:
    """Raise an error if a draw is no function of single examples: if two calls differ, or if neighbours matter."""
    if len(inputs):
        remembered(posterior, "functions", (), lambda: _try_functions(posterior, inputs))


def _try_functions(posterior: Posterior, inputs: Any) -> bool | None:
    """Return whether it is known now: a single example says nothing of neighbours."""
    function, few = posterior.draw(0, 0), inputs[:TRIED]
    once, half = function(few), len(few) // 2
    rounding = min(0.1, 1000 * torch.finfo(once.dtype).eps) * once.abs().max() if once.numel() else 0.0

    def differ(first: Tensor, second: Tensor) -> bool:  # other checks find draws that are not finite
        return first.shape != second.shape or bool(((first - second).abs() > rounding).any())

    for part in [slice(half), slice(half, None), slice(1)] if half else [slice(None)]:  # with other neighbours
        found = function(few[part])
        if differ(once[part], found) and differ(found, function(few[part])):
            raise BatchbayesError(
                expected="a network that gives the same answer twice",
                got="two answers of one draw that differ",
                fix="take random numbers out of its forward: use nn.Dropout, or F.dropout with training=self.training",
            )
        if differ(once[part], found):
            raise BatchbayesError(
                expected="a network that treats each example by itself",
                got="an answer that changes with the other examples of its batch",
                fix="look for F.batch_norm(training=True) or other statistics of the batch in its forward pass",
            )
    return True if half or isinstance(inputs, Whole) else None


def joined(pieces: Sequence[Any]) -> Any:
    """Join the predictives of consecutive chunks."""
    if len(pieces) == 1:
        return pieces[0]
    return replace(type(pieces[0]).concatenate(pieces), engine=pieces[-1].engine, drawn=pieces[-1].drawn)


def _complete(kept: list[Block], num_samples: int) -> Block | None:
    """Return the blocks of a chunk as one, or None if some draws were not kept."""
    if sum(map(len, kept)) < num_samples:
        return None
    tensors = [block for block in kept if isinstance(block, Tensor)]
    return torch.cat(tensors) if tensors else kept[0]
