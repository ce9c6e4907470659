"""Files that are complete or absent: written under a temporary name, flushed to disk, then renamed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

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
