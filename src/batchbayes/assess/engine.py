"""One pass over the data for several likelihoods, kept in memory or handed on piece by piece."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, distributions

from batchbayes.data.examples import Examples
from batchbayes.engines.linear_draws import Block, Kept
from batchbayes.likelihoods import Likelihood
from batchbayes.posterior import Posterior
from batchbayes.prediction import Engine, predict


@dataclass(frozen=True, eq=False)
class Bundle:
    """What several likelihoods make of the same draws."""

    predictives: tuple[Any, ...]
    engine: str = ""

    @classmethod
    def concatenate(cls, pieces: Sequence[Self]) -> Self:
        """Join bundles of consecutive examples, one likelihood at a time."""
        columns = zip(*(piece.predictives for piece in pieces), strict=True)
        return cls(tuple(type(column[0]).concatenate(column) for column in columns))


@dataclass(frozen=True)
class Together:
    """Several likelihoods as one."""

    likelihoods: tuple[Likelihood[Any], ...]

    @property
    def shift_invariant(self) -> bool:
        """Whether it is for all of them nothing to add one number to all outputs of an example."""
        return all(getattr(likelihood, "shift_invariant", False) for likelihood in self.likelihoods)

    def __call__(self, outputs: Tensor) -> distributions.Distribution:
        return self.likelihoods[0](outputs)

    def summary(self) -> "RunningBundle":
        return RunningBundle([likelihood.summary() for likelihood in self.likelihoods])


class RunningBundle:
    """Hands every block of draws to each of several running summaries."""

    def __init__(self, summaries: Sequence[Any]) -> None:
        self._summaries = summaries
        self.needs_draws = any(summary.needs_draws for summary in summaries)

    def add(self, block: Block) -> None:
        for summary in self._summaries:
            summary.add(block)

    def finish(self, draws: Kept | None) -> Bundle:
        return Bundle(tuple(summary.finish(draws) for summary in self._summaries))


@dataclass(frozen=True, eq=False)
class Handed:
    """Nothing is kept of a piece that was handed on."""

    engine: str = ""

    @classmethod
    def concatenate(cls, pieces: Sequence[Self]) -> Self:
        return pieces[0]


@dataclass(frozen=True)
class HandingOn:
    """Several likelihoods whose predictives go to a consumer, piece by piece, instead of being kept."""

    together: Together
    consume: Callable[[tuple[Any, ...]], None]

    @property
    def shift_invariant(self) -> bool:
        return self.together.shift_invariant

    def __call__(self, outputs: Tensor) -> distributions.Distribution:
        return self.together(outputs)

    def summary(self) -> "RunningHanded":
        return RunningHanded(self.together.summary(), self.consume)


class RunningHanded(RunningBundle):
    """A bundle that is given away when it is finished."""

    def __init__(self, bundle: RunningBundle, consume: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__(bundle._summaries)
        self._consume = consume
        self.needs_draws = False

    def finish(self, draws: Kept | None) -> Any:
        self._consume(super().finish(draws).predictives)
        return Handed()


@dataclass(frozen=True)
class Drawing:
    """How draws are made, for every pass alike."""

    num_samples: int
    seed: int
    engine: Engine

    def bundle(
        self, posterior: Posterior, data: Examples, likelihoods: Sequence[Likelihood[Any]], keep_draws: bool = False
    ) -> Bundle:
        """The predictives of all examples, one for each likelihood."""
        count, engine = self._for(posterior)
        together, keep = Together(tuple(likelihoods)), True if keep_draws else None
        return predict(posterior, data, together, num_samples=count, seed=self.seed, engine=engine, keep_draws=keep)

    def stream(
        self,
        posterior: Posterior,
        data: Examples,
        likelihoods: Sequence[Likelihood[Any]],
        consume: Callable[[tuple[Any, ...], Tensor, Tensor], None],
        chunk_size: int = 1,
    ) -> str:
        """Hand predictives, inputs and targets of a few examples at a time to `consume`; returns the engine's name.

        Targets are zeros where the data has none.
        """
        count, engine = self._for(posterior)
        waiting: deque[tuple[Tensor, Tensor]] = deque()

        def inputs() -> Iterator[Tensor]:
            for batch, targets in data:
                labelled = batch.new_zeros(len(batch)) if targets is None else targets
                for some, labels in zip(batch.split(chunk_size), labelled.split(chunk_size), strict=True):
                    waiting.append((some, labels))
                    yield some

        def hand_on(predictives: tuple[Any, ...]) -> None:
            consume(predictives, *waiting.popleft())

        likelihood = HandingOn(Together(tuple(likelihoods)), hand_on)
        done = predict(
            posterior, inputs(), likelihood, num_samples=count, seed=self.seed, engine=engine, chunk_size=chunk_size
        )
        return done.engine

    def _for(self, posterior: Posterior) -> tuple[int, Engine]:
        """A network without noise is run once."""
        quiet = getattr(posterior, "method", "") == "deterministic"
        return (1, "sample") if quiet else (self.num_samples, self.engine)
