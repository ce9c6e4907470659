"""Odd images, and odd files beside them."""

import struct
import zlib

import numpy as np
from PIL import Image

from helpers.odd_commands.arrays import damage
from helpers.odd_commands.command import ANY, NONE, Command
from helpers.odd_commands.plain import save_png


def odd_images(source, bases, folder):
    """A folder of images, or one image, with one odd file."""
    base = bases["images"]
    rows = sorted(source.sample(range(20), source.choice([1, 4])))
    place = folder / "odd"
    place.mkdir()
    for row in rows:
        save_png(place / f"{row:02d}.png", base.inputs[row])
    path, pixels, expected = place / f"{rows[0]:02d}.png", base.inputs[rows[0]], base.answers[rows]
    right = source.choice(IMAGE_CHANGES)(source, path, pixels, place)
    given = path if len(rows) == 1 and path.exists() and source.random() < 0.5 else place
    return Command("predict", base.options | {"--input": given}, expected if right is True else right, "confidence")


def image_format(source, path, pixels, place):
    image = Image.fromarray(pixels)
    suffix = source.choice(["bmp", "tif", "webp", "PNG"])
    path.unlink()
    image.save(path.with_suffix(f".{suffix}"), lossless=True)
    return True


def image_mode(source, path, pixels, place):
    image = Image.fromarray(pixels)
    mode = source.choice(["RGBA", "transparent", "P", "I;16", "I", "F", "CMYK", "1", "L", "LA", "rotated"])
    if mode == "RGBA":
        image.convert("RGBA").save(path)
        return True
    if mode == "transparent":
        image.putalpha(source.choice([0, 128, 254]))
        image.save(path)
        return NONE
    if mode == "P":
        image.quantize(256).save(path)
        return ANY  # quantize may round colours
    if mode in ("I;16", "I", "F"):
        grey = np.asarray(image.convert("L")).astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode])
        path.unlink()
        Image.fromarray(grey * (257 if mode == "I;16" else 1)).save(path.with_suffix(".tif"))
        return ANY if mode == "I;16" else NONE
    if mode == "CMYK":
        path.unlink()
        image.convert("CMYK").save(path.with_suffix(".tif"))
        return ANY
    if mode == "rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.rotate(90, expand=True).save(path, exif=exif)
        return True
    image.convert(mode).save(path)
    return ANY


def image_size(source, path, pixels, place):
    shape = source.choice([(1, 1), (6, 7), (600, 2)])
    save_png(path, np.zeros((*shape, 3), np.uint8))
    return NONE


def image_damage(source, path, pixels, place):
    damage(source, path)
    try:
        with Image.open(path) as image:
            return True if np.array_equal(np.asarray(image), pixels) else NONE if image.mode != "RGB" else ANY
    except Exception:
        return NONE


def image_bomb(source, path, pixels, place):
    """A header that promises a picture of many gigabytes."""
    size = source.choice([(2**31 - 1, 2**31 - 1), (100_000, 100_000), (0, 5), (1, 2**30)])
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    return NONE


def image_company(source, path, pixels, place):
    """Other things in the folder."""
    what = source.choice(["text", "hidden", "hidden folder", "folder", "link"])
    if what == "text":
        (place / "notes.txt").write_text("hello")
    elif what == "hidden":
        (place / "._1.png").write_bytes(b"junk")
    elif what == "hidden folder":
        (place / ".cache").mkdir()
        (place / ".cache" / "1.png").write_bytes(b"junk")
    elif what == "folder":
        (place / "empty").mkdir()
    else:
        (place / "99.png").symlink_to(place / "nowhere.png")
        return ANY
    return True


IMAGE_CHANGES = [image_format, image_mode, image_mode, image_size, image_damage, image_bomb, image_company]
