"""Where data sets lie: a folder that the user names, with one sub-folder a data set."""

import os
from pathlib import Path

from batchbayes.errors import BatchbayesError

VARIABLE = "BATCHBAYES_DATA"


def data_file(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The path of `name` (such as "cifar10/labels.npz") in `folder`, or in the one that BATCHBAYES_DATA names."""
    base = folder or os.environ.get(VARIABLE)
    if not base:
        raise BatchbayesError(
            expected=f"a data folder with {name}", got="none", fix=f"pass the folder, or set {VARIABLE} to it"
        )
    path = Path(base) / name
    if not path.exists():
        raise BatchbayesError(
            expected=f"the file {name}", got=f"nothing there in {base}", fix="put it there, or name another folder"
        )
    return path


def cache_folder() -> Path:
    """Where downloads are kept: `batchbayes` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchbayes"


def mosaic(path: Path, height: int, width: int):
    """Cut an image file of tiles into an array (tiles, height, width, 3) of bytes, row by row."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    tiles = pixels.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
    return tiles.reshape(rows * columns, height, width, 3)
