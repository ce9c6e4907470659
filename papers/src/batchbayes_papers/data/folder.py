"""The data folder of the user, with one sub-folder for each data set."""

import os
from pathlib import Path

from batchbayes import BatchbayesError
from batchbayes.tools import as_path

VARIABLE = "BATCHBAYES_DATA"
DataFolder = str | os.PathLike[str] | None
"""The path of a data folder; None means the folder in the environment variable BATCHBAYES_DATA."""


def data_file(name: str, folder: DataFolder = None) -> Path:
    """Return the path of a file such as "cifar10/labels.npz" in the data folder. The file must exist."""
    base = folder or os.environ.get(VARIABLE)
    if not base:
        raise BatchbayesError(
            expected=f"a data folder with {name}", got="none", fix=f"pass the folder, or set {VARIABLE} to its path"
        )
    path = as_path(base) / name
    if not path.exists():
        raise BatchbayesError(
            expected=f"the file {name} in {base}", got="no such file", fix="put it there, or give another folder"
        )
    return path


def cache_folder() -> Path:
    """Return the folder for downloads: `batchbayes` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchbayes"


def read_mosaic(path: Path, height: int, width: int):
    """Cut an image that consists of tiles, row by row, into bytes of shape (tiles, 3, height, width)."""
    import numpy as np
    from PIL import Image

    try:
        pixels = np.asarray(Image.open(path).convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # what pillow raises for damaged files
        raise BatchbayesError(
            expected=f"an image that consists of tiles in {path}",
            got=f"a damaged file ({' '.join(str(error).split())[:200]})",
            fix="copy that file again",
        ) from error
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    tiles = pixels.reshape(rows, height, columns, width, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(rows * columns, 3, height, width)
