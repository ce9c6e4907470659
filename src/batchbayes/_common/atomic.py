"""Files that are whole or absent: written under another name, flushed, then renamed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; when the block ends well it takes the place of `path`, otherwise nothing is left.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "result.txt"
    >>> with atomic_path(target) as partial:
    ...     _ = partial.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.chmod(0o666 & ~_umask())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
