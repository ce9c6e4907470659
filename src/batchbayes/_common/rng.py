"""Random streams: each has a name (seed, path), and its numbers depend on that name alone.

Each draw has its own stream. So a draw does not depend on the number of draws, on their order or on the chunks.
"""

import hashlib
import random
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch


def stream_seed(seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for the stream of this name. Streams of different names are independent."""
    digest = hashlib.blake2b(repr((int(seed), *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *path: int | str) -> torch.Generator:
    """Return a new CPU generator at the start of the stream (seed, path).

    >>> a = torch.randn(2, generator=generator(0, "draw", 3))
    >>> b = torch.randn(2, generator=generator(0, "draw", 3))
    >>> bool((a == b).all())
    True
    """
    return torch.Generator().manual_seed(stream_seed(seed, *path))


class GlobalStream:
    """A seeded stream for code that draws from the global generators of torch, numpy and Python.

    Data loaders, augmentations and dropout draw from the global generators. Inside `with stream:` these generators
    continue this stream. After the block they have their former state again, and the stream remembers its place for
    the next block. The global generators belong to the whole process, so only one thread at a time can be in a block.
    Those of CUDA devices are included once a program uses them; those of other accelerators are not.

    >>> stream = GlobalStream(0)
    >>> with stream:
    ...     first = torch.rand(2)
    >>> with stream:
    ...     second = torch.rand(2)
    >>> with GlobalStream(0):
    ...     bool((torch.rand(4) == torch.cat([first, second])).all())
    True
    """

    _LOCK = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._seed, self._place, self._outside = seed, None, []

    def __enter__(self) -> None:
        self._LOCK.acquire()
        self._outside.append(_global_states())
        if self._place is not None:
            _set_global_states(self._place)
            return
        torch.default_generator.manual_seed(stream_seed(self._seed, "torch"))
        np.random.seed(stream_seed(self._seed, "numpy") % 2**32)
        random.seed(stream_seed(self._seed, "python"))
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(stream_seed(self._seed, "cuda"))

    def __exit__(self, *_: object) -> None:
        self._place = _global_states()
        _set_global_states(self._outside.pop())
        self._LOCK.release()
        time.sleep(0)  # a thread that enters blocks in a loop would otherwise never let another thread in

    def state(self) -> Any:
        """Return the place in the stream as plain values and tensors, for `restore`; None before the first block."""
        if self._place is None:
            return None
        of_torch, (name, key, *rest), *others = self._place
        return of_torch, (name, key.tolist(), *rest), *others

    def restore(self, state: Any) -> None:
        """Continue from a place that `state` returned, in this process or in another one."""
        self._place = state


def _global_states() -> tuple[Any, ...]:
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), of_cuda


def _set_global_states(states: Any) -> None:
    of_torch, of_numpy, of_python, *of_cuda = states  # files of earlier versions have nothing for CUDA
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
    if of_cuda and of_cuda[0]:
        torch.cuda.set_rng_state_all(of_cuda[0])


def normals(seed: int, indices: Sequence[int], size: int) -> torch.Tensor:
    """Return standard normal numbers for the given draws, (s, size) in float64. Each draw has its own stream.

    >>> bool((normals(0, [3], 2)[0] == normals(0, range(5), 2)[3]).all())
    True
    """
    numbers, source = torch.empty(len(indices), size, dtype=torch.float64), torch.Generator()
    for row, index in zip(numbers, indices, strict=True):
        row.normal_(generator=source.manual_seed(stream_seed(seed, "draw", index)))
    return numbers


def dealt(seed: int, index: int, cards: int) -> int:
    """Return the card, from 0 to `cards - 1`, that draw `index` gets.

    The cards are dealt from shuffled decks: each card comes once before any card comes again. The seed sets the order.

    >>> sorted(dealt(0, index, 4) for index in range(4))
    [0, 1, 2, 3]
    """
    deck, position = divmod(index, cards)
    return _deck(seed, deck, cards)[position]


@lru_cache(maxsize=16)
def dealt_first(seed: int, count: int, cards: int) -> torch.Tensor:
    """Return the cards that the first `count` draws get, (count,). The tensor is kept: do not change it.

    >>> dealt_first(0, 9, 4).tolist() == [dealt(0, index, 4) for index in range(9)]
    True
    """
    decks = [_deck(seed, deck, cards) for deck in range(-(-count // cards))]
    return torch.tensor([card for deck in decks for card in deck])[:count]


def even_numbers(seed: int, index: int, size: int) -> torch.Tensor:
    """Return uniform numbers for draw `index`, (size,) in float64, that are spread evenly over draws.

    The draws are points of a scrambled Sobol sequence: of the first $2^k$ draws, each number falls once into each of
    $2^k$ equal parts of the unit interval. The seed sets the scrambling. Reference: Owen, J. Complexity 14 (1998).
    The sequence has some 20,000 numbers for each draw. If more are asked for, the others are independent.

    >>> sorted(int(4 * even_numbers(0, index, 2)[1]) for index in range(4))
    [0, 1, 2, 3]
    """
    block, position = divmod(index, _BLOCK)
    even = _even_block(seed, block, min(size, _MOST_EVEN))[position].clone()
    if size <= _MOST_EVEN:
        return even
    more = torch.rand(size - _MOST_EVEN, generator=generator(seed, "more", index), dtype=torch.float64)
    return torch.cat([even, more])


def fold_numbers(count: int, folds: int, seed: int) -> torch.Tensor:
    """Return for each of `count` examples the number of its fold, (count,). Folds are random and of equal size.

    >>> sorted(fold_numbers(7, 3, seed=0).tolist())
    [0, 0, 0, 1, 1, 2, 2]
    """
    return (torch.arange(count) % folds)[torch.randperm(count, generator=generator(seed, "folds"))]


_BLOCK, _MOST_EVEN = 64, torch.quasirandom.SobolEngine.MAXDIM


@lru_cache(maxsize=32)
def _even_block(seed: int, block: int, size: int) -> torch.Tensor:
    """Return the numbers of 64 consecutive draws: to set up the sequence takes longer than to draw from it."""
    sequence = torch.quasirandom.SobolEngine(size, scramble=True, seed=stream_seed(seed, "even numbers"))
    return sequence.fast_forward(block * _BLOCK).draw(_BLOCK, dtype=torch.float64)


@lru_cache(maxsize=16)
def _deck(seed: int, deck: int, cards: int) -> list[int]:
    """Return the cards of one deck in their order. The list is kept: do not change it."""
    return torch.randperm(cards, generator=generator(seed, "deck", deck)).tolist()
