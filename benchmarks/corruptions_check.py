"""Our corruptions beside those of the package `imagecorruptions` (in an environment of its own), at our settings.

    python benchmarks/corruptions_check.py make DATA_FOLDER IMAGES.npz      # here
    python benchmarks/corruptions_check.py compare IMAGES.npz               # where imagecorruptions is installed

The package has the settings of ImageNet-C. Its functions run here with those of CIFAR-10-C, which take the place of the
list in each function. Left out: glass blur and fog, which do not run with recent scikit-image and numpy; frost, which
needs photographs; elastic, where the package has another algorithm. For each corruption: how far images are from the
clean ones (root mean square, in grey levels of 255) in ours and theirs, and the mean difference of the two.
"""

import inspect
import re
import sys

import numpy as np

IMAGES, SEVERITIES = 100, (1, 3, 5)
SETTINGS = {
    "gaussian noise": (0.04, 0.08, 0.10),
    "shot noise": (500, 100, 50),
    "impulse noise": (0.01, 0.03, 0.07),
    "defocus blur": ((0.3, 0.4), (0.5, 0.6), (1.5, 0.1)),
    "motion blur": ((6, 1.0), (6, 2.0), (9, 2.5)),
    "zoom blur": tuple(tuple(1 + 0.01 * i for i in range(count)) for count in (6, 16, 26)),
    "snow": ((0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)),
    "brightness": (0.05, 0.15, 0.3),
    "contrast": (0.75, 0.4, 0.15),
    "pixelate": (0.95, 0.85, 0.65),
    "jpeg": (80, 58, 40),
}


def make(folder: str, path: str) -> None:
    import torch
    from batchbayes_papers.data.cifar10 import load_cifar10
    from corruptions import corrupt

    torch.set_num_threads(1)
    clean = load_cifar10("test", folder, IMAGES)[0]
    made = {f"{name} {s}": corrupt(clean, name, s).numpy() for name in SETTINGS for s in SEVERITIES}
    np.savez(path, clean=clean.numpy(), **made)


def theirs(name: str, setting: object, image: np.ndarray) -> np.ndarray:
    """Run a function of the package on an image (32, 32, 3) with a setting of ours."""
    from imagecorruptions import corruptions
    from PIL import Image

    function = "jpeg_compression" if name == "jpeg" else name.replace(" ", "_")
    source = inspect.getsource(getattr(corruptions, function))
    source = re.sub(r"c = \[.*?\]\[\s*severity - 1\]", "c = SETTING", source, count=1, flags=re.DOTALL)
    space = vars(corruptions) | {"SETTING": setting}
    exec(source, space)
    return np.asarray(space[function](Image.fromarray(image))).round().clip(0, 255).astype(float)


def compare(path: str) -> None:
    images = np.load(path)
    clean = images["clean"].transpose(0, 2, 3, 1)
    print("| | " + " | ".join(f"severity {s}: ours, theirs, apart" for s in SEVERITIES) + " |\n|---|---|---|---|")
    for name, settings in SETTINGS.items():
        cells = []
        for severity, setting in zip(SEVERITIES, settings, strict=True):
            own = images[f"{name} {severity}"].transpose(0, 2, 3, 1).astype(float)
            np.random.seed(0)
            other = np.stack([theirs(name, setting, image) for image in clean])
            rms = [np.sqrt(np.square(each - clean).mean()) for each in (own, other)]
            cells.append(f"{rms[0]:.1f}, {rms[1]:.1f}, {np.abs(own - other).mean():.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    {"make": make, "compare": compare}[sys.argv[1]](*sys.argv[2:])
