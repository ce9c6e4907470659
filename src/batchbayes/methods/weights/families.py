"""All families of weight distributions by the kind that files name."""

from collections.abc import Mapping
from typing import Any

from batchbayes.errors import unknown_name
from batchbayes.methods.weights.binary_dropout import BinaryDropout
from batchbayes.methods.weights.family import Family
from batchbayes.methods.weights.flow import MultiplicativeFlow
from batchbayes.methods.weights.mean_field import MeanField
from batchbayes.methods.weights.sparse import SparseVD
from batchbayes.methods.weights.variance import Variance
from batchbayes.methods.weights.variational_dropout import GaussianDropout, VariationalDropout

_ALL = (MeanField, SparseVD, VariationalDropout, GaussianDropout, BinaryDropout, Variance, MultiplicativeFlow)

FAMILIES: dict[str, type[Family]] = {family.kind: family for family in _ALL}


def restore_family(values: Mapping[str, Any]) -> Family:
    """Return a family from the values that a file holds."""
    fields = dict(values)
    kind = fields.pop("kind")
    if kind not in FAMILIES:
        raise unknown_name("a family of weights", kind, FAMILIES)
    return FAMILIES[kind](**fields)
