"""Maps of a segmentation as files: the class of each pixel, and how uncertain it is."""

import colorsys
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np

from batchbayes._common.files import atomic_path, words_for_disk_errors
from batchbayes.errors import BatchbayesError
from batchbayes.predictive import CategoricalPredictive
from batchbayes.report.compare.rows import Show


def map_writer(folder: Path, task: str, num_classes: int) -> Show:
    """Return a function that writes NAME_classes.png and NAME_entropy.png for the prediction of an image.

    The value of a pixel in the first is the number of its class; a palette gives each class a colour. In the second it
    is the entropy, from 0 (black) to that of equal probabilities (255).
    """
    if task != "segmentation":
        raise BatchbayesError(expected="a segmentation for --maps", got=f"a {task}", fix="leave out --maps")
    if num_classes > 256:
        raise BatchbayesError(expected="at most 256 classes for maps", got=f"{num_classes}", fix="leave out --maps")
    with words_for_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    palette, used = _palette(num_classes), Counter()

    def write(name: str, seen: CategoricalPredictive) -> None:
        from PIL import Image

        if seen.entropy.ndim != 3:
            raise BatchbayesError("images for --maps", "sequences of tokens", "leave out --maps")
        classes = Image.fromarray(seen.log_probs[0].argmax(-1).byte().numpy(), mode="P")
        classes.putpalette(palette)
        entropy = (seen.entropy[0] * (255 / math.log(max(2, num_classes)))).round().clamp(0, 255)
        stem = file_name(name)
        used[stem] += 1  # 1.png and 1.jpg have the same one
        stem += f"_{used[stem]}" if used[stem] > 1 else ""
        for what, image in (("classes", classes), ("entropy", Image.fromarray(entropy.byte().numpy()))):
            with words_for_disk_errors(folder), atomic_path(folder / f"{stem}_{what}.png") as partial:
                image.save(partial, format="PNG")

    return write


def file_name(name: str) -> str:
    """Return the name of an image without its ending, in letters that every file system takes.

    >>> file_name("street/0001.jpg"), file_name("../x")
    ('street_0001', 'x')
    """
    return re.sub(r"[^\w.-]+", "_", re.sub(r"\.\w{1,5}$", "", name)).strip("._") or "image"


def _palette(num_classes: int) -> bytes:
    """Return red, green and blue of each class: hues at equal distances, the first class black."""
    colours = [colorsys.hsv_to_rgb(k / max(1, num_classes - 1), 0.75, 0.95 * (k > 0)) for k in range(num_classes)]
    return (255 * np.array(colours)).round().astype(np.uint8).tobytes()
