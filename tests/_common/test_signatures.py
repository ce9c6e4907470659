import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from batchbayes import BatchbayesError
from batchbayes._common.signatures import Count, Least, Positive, Seed, Share, checked


@checked
def example(
    values: Tensor,
    count: Count = 1,
    seed: Seed = 0,
    least: Annotated[int, Least(2)] | None = None,
    level: Share = 0.9,
    place: str | os.PathLike[str] | None = None,
    kind: Literal["a", "b"] | None = None,
    anything: object = None,
) -> tuple[object, ...]:
    return values, count, seed, least, level, place, kind, anything


def test_arguments_come_as_the_annotation_says() -> None:
    values, count, seed, least, level, place, kind, anything = example(
        [1.0, 2.0], np.int64(3), seed=-1, least=None, level=0.5, place="here", kind="b", anything="x"
    )
    assert isinstance(values, Tensor)
    assert values.tolist() == [1.0, 2.0]
    assert (count, seed, least, level, place, kind, anything) == (3, -1, None, 0.5, Path("here"), "b", "x")
    assert type(count) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "words"}, "values as a tensor or an array of numbers; got a str"),
        ({"values": torch.zeros(1, dtype=torch.complex64)}, "real numbers in values"),
        ({"count": 0}, "count as a whole number of at least 1; got count=0"),
        ({"count": True}, "count as a whole number"),
        ({"seed": 0.5}, "seed as a whole number; got seed=0.5"),
        ({"least": 1}, "least as a whole number of at least 2"),
        ({"level": 1.0}, "level between 0 and 1, both excluded; got 1.0"),
        ({"level": float("nan")}, "level between 0 and 1"),
        ({"place": 3}, "the path of a file or folder"),
        ({"kind": "c"}, 'kind="a" or "b"; got \'c\''),
    ],
)
def test_what_does_not_fit_is_refused_in_words(options: dict, message: str) -> None:
    with pytest.raises(BatchbayesError, match=message):
        example(**{"values": torch.ones(1), **options})


def test_the_constructor_of_a_dataclass_is_checked_too() -> None:
    @checked
    @dataclass(frozen=True)
    class Settings:
        rate: Positive = 0.1

    assert replace(Settings(), rate=0.5).rate == 0.5
    with pytest.raises(BatchbayesError, match="rate above 0; got 0"):
        replace(Settings(), rate=0)


def test_a_missing_argument_is_an_error_of_the_function_itself() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'values'"):
        example()  # type: ignore[call-arg]
