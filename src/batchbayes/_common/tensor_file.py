"""Safetensors files: tensors, which are read when they are asked for, and texts of JSON beside them."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from batchbayes._common.atomic import atomic_path, words_for_disk_errors
from batchbayes._common.checks import as_path
from batchbayes.errors import BatchbayesError

UNREADABLE = (SafetensorError, OSError, LookupError, ValueError, RecursionError)
"""What reading raises if a file is damaged or something else."""


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors and texts to a file, whole or not at all."""
    path = as_path(path)
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with words_for_disk_errors(path), atomic_path(path) as partial:
        save_file(own, partial, dict(texts))


def read_json(path: str | os.PathLike[str], name: str, default: str | None = None) -> Any:
    """Read one of the texts of a file, as JSON values. Without a default it must be there."""
    with safe_open(path, framework="pt") as file:
        texts = file.metadata() or {}
    return json.loads(texts[name] if default is None else texts.get(name, default))


class TensorFile(Mapping[str, Tensor]):
    """The tensors in a file by name. Nothing stays in memory: each access opens the file, reads, and closes it.

    A file that has changed since it was first opened is refused. `prefix` selects the names that begin with it, and is
    taken off these names.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str = "") -> None:
        self._path, self._prefix = Path(path), prefix
        self._stamp = self._present_stamp()
        with self._open() as file:
            self._names = [n.removeprefix(prefix) for n in file.keys() if n.startswith(prefix)]  # noqa: SIM118

    def under(self, prefix: str) -> "TensorFile":
        """Return those tensors whose names begin with a prefix, by the rest of their names."""
        return TensorFile(self._path, self._prefix + prefix)

    def rows(self, index: int) -> dict[str, Tensor]:
        """Return row `index` of each tensor. Only these rows are read."""
        with self._open() as file:
            return {name: file.get_slice(self._prefix + name)[index].clone() for name in self._names}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with self._open() as file:
            return file.get_tensor(self._prefix + name).clone()  # the clone does not keep the file mapped

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _present_stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise self._changed("nothing there") from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    @contextmanager
    def _open(self) -> Iterator[Any]:
        if self._present_stamp() != self._stamp:
            raise self._changed("another file in its place")
        with safe_open(self._path, framework="pt") as file:
            yield file

    def _changed(self, got: str) -> BatchbayesError:
        return BatchbayesError(
            expected=f"the file {self._path}, from which weights are read when they are needed",
            got=got,
            fix="leave the file in its place as long as the posterior is used, or load it again",
        )


def under(tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names. A file stays unread.

    >>> import torch
    >>> under({"a.x": torch.ones(1), "b.x": torch.zeros(1)}, "a.")
    {'x': tensor([1.])}
    """
    if isinstance(tensors, TensorFile):
        return tensors.under(prefix)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def rows(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return row `index` of each tensor (S, ...).

    >>> import torch
    >>> rows({"x": torch.tensor([[1, 2], [3, 4]])}, 1)
    {'x': tensor([3, 4])}
    """
    return tensors.rows(index) if isinstance(tensors, TensorFile) else {n: t[index] for n, t in tensors.items()}
