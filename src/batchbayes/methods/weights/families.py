"""All families of weight distributions by the kind that files name."""

from collections.abc import Mapping
from typing import Any

from batchbayes.errors import unknown_name
from batchbayes.methods.weights.family import Family
from batchbayes.methods.weights.mean_field import MeanField
from batchbayes.methods.weights.sparse import SparseVD

FAMILIES: dict[str, type[Family]] = {family.kind: family for family in (MeanField, SparseVD)}


def restore_family(values: Mapping[str, Any]) -> Family:
    """Return a family from the values that a file holds."""
    fields = dict(values)
    kind = fields.pop("kind")
    if kind not in FAMILIES:
        raise unknown_name("a family of weights", kind, FAMILIES)
    return FAMILIES[kind](**fields)
