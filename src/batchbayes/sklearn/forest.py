"""Trees beside the networks: extremely randomised ones, whose leaves remember single rows.

Where targets repeat, jump or have several modes, the targets of similar rows are a better distribution than a spread
around a mean. Each tree predicts one number, and the numbers of all trees are a distribution. As networks do, a tree
leaves out one fold; held-out rows choose how much the trees count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor

from batchbayes._common.rng import stream_seed

TREES = 8
"""Trees for each fold and seed."""
MOST_ROWS = 5000
"""Rows that a tree is grown from. The trees of each fold and seed have other ones."""


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees, as arrays over the nodes of all of them."""

    column: Tensor
    """The input that each node asks for."""
    limit: Tensor
    """Rows above it go to the second child."""
    children: Tensor
    """(nodes, 2). The children of a leaf are itself."""
    value: Tensor
    """What a leaf predicts."""
    roots: Tensor
    """The first node of each tree, (G, T), for G pairs of a seed and a fold."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the numbers of all trees, (N, G * T)."""
        return self._values(inputs, self.roots.flatten().expand(len(inputs), -1))

    def held_out(self, inputs: Tensor, folds: Tensor) -> Tensor:
        """Return for each row the numbers of the trees that left it out, (N, R * T), for folds (R, N)."""
        number = torch.arange(len(folds))[:, None] * (len(self.roots) // len(folds)) + folds
        return self._values(inputs, self.roots[number.T].flatten(1))

    def _values(self, inputs: Tensor, node: Tensor) -> Tensor:
        while True:
            above = inputs.gather(1, self.column[node]) > self.limit[node]
            after = self.children[node, above.long()]
            if after.equal(node):
                return self.value[node]
            node = after


def grow(inputs: Tensor, targets: Tensor, folds: Tensor, seed: int) -> Forest:
    """Grow trees without each fold of each seed, for inputs (N, Q), targets (N,) and folds (R, N)."""
    parts: list[Mapping[str, np.ndarray]] = []
    for number, used in enumerate(own != fold for own in folds for fold in own.unique()):
        every = -(-int(used.sum()) // MOST_ROWS)
        rows = used.nonzero()[number % every :: every, 0]
        state = stream_seed(seed, "trees", number) % 2**32
        model = ExtraTreesRegressor(TREES, random_state=state).fit(inputs[rows].numpy(), targets[rows].numpy())
        parts += [_arrays(each.tree_) for each in model.estimators_]
    sizes = [len(part["value"]) for part in parts]
    starts = np.cumsum([0, *sizes[:-1]])
    children = np.concatenate([part["children"] + start for part, start in zip(parts, starts, strict=True)])
    column, limit, value = (np.concatenate([part[name] for part in parts]) for name in ("column", "limit", "value"))
    arrays = column, limit, children, value, starts.reshape(-1, TREES)
    return Forest(*(torch.from_numpy(each) for each in arrays))


def _arrays(tree: object) -> dict[str, np.ndarray]:
    """Return the nodes of one tree of scikit-learn."""
    column, limit, left, right, value = (
        getattr(tree, name) for name in ("feature", "threshold", "children_left", "children_right", "value")
    )
    own, is_leaf = np.arange(len(column)), left < 0
    children = np.where(is_leaf[:, None], own[:, None], np.stack([left, right], 1))
    return {"column": np.maximum(column, 0), "limit": limit, "children": children, "value": value[:, 0, 0]}
