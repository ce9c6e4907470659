"""Plain cases, which odd ones are made from."""

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from helpers import assess_cases
from helpers.odd_commands.command import HELPERS


def write_regression(folder):
    arguments = assess_cases.write_case("regression", folder)
    x, y = assess_cases.wave(40, 7)
    assess_cases.write_csv(folder / "plain.csv", x, y)
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    keep = {key: options[key] for key in ("--model", "--weights")}
    return x.numpy(), folder / "plain.csv", [word for word in arguments if word != "--quiet"], keep


def write_classes(folder):
    arguments = assess_cases.write_case("classification", folder)
    x, _ = assess_cases.blobs(40, 7)
    np.savez(folder / "plain.npz", X=x.numpy())
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    keep = {key: options[key] for key in ("--model", "--weights")}
    return x.numpy(), folder / "plain.npz", [word for word in arguments if word != "--quiet"], keep


def write_images(folder):
    """Images of 6 x 6 pixels of 8 bits in three classes: which colour is the strongest."""
    source = np.random.default_rng(0)
    for part, count in (("train", 48), ("test", 36)):
        for label, name in enumerate(("blue", "green", "red")):
            (folder / part / name).mkdir(parents=True)
            for i in range(count // 3):
                save_png(folder / part / name / f"{i}.png", picture(source, 2 - label))
    pictures = np.stack([picture(source, i % 3) for i in range(20)])
    (folder / "plain").mkdir()
    for i, each in enumerate(pictures):
        save_png(folder / "plain" / f"{i:02d}.png", each)
    network = assess_cases.colours()
    save_file(network.state_dict(), folder / "weights.safetensors")
    model = {"--model": f"{HELPERS}:colours", "--weights": str(folder / "weights.safetensors")}
    scale = ["--mean", "0.3", "--std", "0.2", "--batch-size", "12"]
    files = ["--train", str(folder / "train"), "--test", str(folder / "test")]
    return pictures, folder / "plain", [*(w for pair in model.items() for w in pair), *files, *scale], model


def picture(source, strong):
    pixels = source.integers(0, 120, (6, 6, 3), dtype=np.uint8)
    pixels[:, :, strong] += 60
    pixels[0, 0] = 0
    return pixels


def save_png(path, pixels):
    Image.fromarray(pixels).save(path)
