"""Files that are complete or absent: written under a temporary name, flushed to disk, then renamed.

Safetensors files: tensors, which are read when they are asked for, and texts of JSON beside them.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from batchbayes._common.checks import as_path
from batchbayes.errors import BatchbayesError


@contextmanager
def words_for_disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say in words that a disk is full, that a folder is missing, or that it cannot be written to."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BatchbayesError(
            expected="a place to write to",
            got=f"{path} ({getattr(error, 'strerror', None) or error})",
            fix="choose another file or folder (--out), or free some space",
        ) from error


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path to write to, and rename it to `path` when the block ends without an error.

    After an error the temporary file is deleted, and `path` is as it was before. If `path` is a link, the file that it
    leads to is replaced. A device, a pipe or a folder is an error, because a rename would destroy it.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "result.txt"
    >>> with atomic_path(target) as partial:
    ...     _ = partial.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "it exists, and is no regular file", str(path))
    partial = target.with_name(f".{target.name}.{os.urandom(8).hex()}.partial")
    partial.touch(exist_ok=False)
    permissions = partial.stat().st_mode  # those of any new file, by the umask
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.chmod(permissions)  # a writer such as safetensors may have put another file in its place
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


CHECKSUM = "sha256"
"""The name of the text that has a hash of all others and of the tensors."""
UNREADABLE = (SafetensorError, OSError, LookupError, ValueError, RecursionError)
"""What reading raises if a file is damaged or something else."""


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors and texts to a file, whole or not at all."""
    path = as_path(path)
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with words_for_disk_errors(path), atomic_path(path) as partial:
        save_file(own, partial, {**texts, CHECKSUM: _checksum(texts, own)})
        _sort_texts(partial)


def _sort_texts(path: Path) -> None:
    """Put the texts of a safetensors file in order, which its library does not. Equal files have equal bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(ordered) <= size:  # the tensors come next, and must never be overwritten
            file.seek(8)
            file.write(ordered.ljust(size))


def _checksum(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(texts.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def read_json(path: str | os.PathLike[str], name: str, default: str | None = None) -> Any:
    """Read one of the texts of a file, as JSON values. Without a default it must be there."""
    with safe_open(path, framework="pt") as file:
        texts = file.metadata() or {}
    return json.loads(texts[name] if default is None else texts.get(name, default))


class ChangedFileError(BatchbayesError):
    """A file that was replaced while it was read."""


class TensorFile(Mapping[str, Tensor]):
    """The tensors in a file by name. Nothing stays in memory: each access opens the file, reads, and closes it.

    A file that has changed since it was first opened is refused. `prefix` selects the names that begin with it, and is
    taken off these names.
    """

    def __init__(
        self, path: str | os.PathLike[str], prefix: str = "", stamp: tuple[int, int, int] | None = None
    ) -> None:
        self._path, self._prefix = Path(path), prefix
        self._stamp = stamp or self._present_stamp()
        with self._open() as file:
            self._names = [n.removeprefix(prefix) for n in file.keys() if n.startswith(prefix)]  # noqa: SIM118
            self.texts: dict[str, str] = file.metadata() or {}

    def under(self, prefix: str) -> "TensorFile":
        """Return those tensors whose names begin with a prefix, by the rest of their names."""
        return TensorFile(self._path, self._prefix + prefix, self._stamp)

    def rows(self, index: int) -> dict[str, Tensor]:
        """Return row `index` of each tensor. Only these rows are read."""
        with self._open() as file:
            return {name: file.get_slice(self._prefix + name)[index].clone() for name in self._names}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with self._open() as file:
            return file.get_tensor(self._prefix + name).clone()  # the clone does not keep the file mapped

    def is_intact(self) -> bool:
        """Read the whole file, and return whether it is as it was written. A file without a checksum may be old."""
        texts = dict(self.texts)
        return (wanted := texts.pop(CHECKSUM, None)) is None or wanted == _checksum(texts, self)

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
        return ChangedFileError(
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
