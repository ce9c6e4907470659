"""One image file: its own scale from 0 to 1, or words."""

import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from batchbayes import BatchbayesError
from batchbayes.report.read.images import read_image
from batchbayes.report.read.sources import read_examples

RAMP = np.arange(12, dtype=np.float64).reshape(3, 4) / 11
"""Grey values of an image that is 4 pixels wide and 3 pixels high."""


def image(kind, values):
    return Image.fromarray(values.astype(kind))


def read(tmp_path, made, name="1.png", **options):
    made.save(tmp_path / name, **options)
    return read_image(tmp_path / name)


GREY = {
    "8 bits": ("1.png", lambda: image(np.uint8, RAMP * 255), 1 / 255),
    "16 bits, PNG": ("1.png", lambda: image(np.uint16, RAMP * 65535), 1 / 65535),
    "16 bits, TIFF": ("1.tif", lambda: image(np.uint16, RAMP * 65535), 1 / 65535),
    "16 bits, big-endian TIFF": ("1.tif", lambda: image(">u2", RAMP * 65535), 1 / 65535),
    "floats": ("1.tiff", lambda: image(np.float32, RAMP), 1e-7),
    "palette": ("1.png", lambda: image(np.uint8, RAMP * 255).convert("P"), 1 / 255),
    "grey with an opaque alpha channel": ("1.png", lambda: image(np.uint8, RAMP * 255).convert("LA"), 1 / 255),
    "opaque alpha channel": ("1.png", lambda: image(np.uint8, RAMP * 255).convert("RGBA"), 1 / 255),
    "CMYK": ("1.tif", lambda: image(np.uint8, RAMP * 255).convert("RGB").convert("CMYK"), 1 / 255),
    "YCbCr": ("1.jpg", lambda: image(np.uint8, RAMP * 255).convert("YCbCr"), 0.05),
    "bitmap": ("1.bmp", lambda: image(np.uint8, RAMP * 255), 1 / 255),
    "web": ("1.webp", lambda: image(np.uint8, RAMP * 255).convert("RGB"), 0.05),
}


@pytest.mark.parametrize("kind", GREY)
def test_grey_values_keep_their_scale(tmp_path, kind):
    name, make, tolerance = GREY[kind]
    pixels = read(tmp_path, make(), name)
    assert (pixels.shape, pixels.dtype) == ((3, 3, 4), torch.float32)
    torch.testing.assert_close(pixels, torch.tensor(RAMP).float().expand(3, 3, 4), atol=tolerance, rtol=0)


def test_one_bit(tmp_path):
    pixels = read(tmp_path, Image.fromarray(RAMP > 0.5))
    assert torch.equal(pixels[0], torch.tensor(RAMP > 0.5).float())


def test_colours(tmp_path):
    colour = (255, 0, 51)
    for mode in ("RGB", "P", "RGBA"):
        pixels = read(tmp_path, Image.new("RGB", (4, 3), colour).convert(mode))
        torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, 0.0, 0.2]))
    cmyk = read(tmp_path, Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "1.jpg", quality=100)
    torch.testing.assert_close(cmyk[:, 0, 0], torch.tensor([1.0, 0.0, 0.0]), atol=0.02, rtol=0)


def test_colours_with_16_bits(tmp_path):
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    values = (RAMP[..., None] * [65535, 0, 13107]).astype(">u2")  # pillow cannot write them
    lines = b"".join(b"\0" + line.tobytes() for line in values)
    header = struct.pack(">IIBBBBB", 4, 3, 16, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    (tmp_path / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    expected = torch.tensor(RAMP[None] * np.array([1, 0, 0.2])[:, None, None]).float()
    torch.testing.assert_close(read_image(tmp_path / "1.png"), expected, atol=1 / 255, rtol=0)


def test_an_image_is_upright_as_a_viewer_shows_it(tmp_path):
    tags = Image.Exif()
    tags[0x0112] = 6  # rotate by 90 degrees to the right
    pixels = read(tmp_path, image(np.uint8, RAMP * 255), exif=tags)
    torch.testing.assert_close(pixels[0], torch.tensor(RAMP).float().rot90(-1), atol=1 / 255, rtol=0)


def transparent():
    made = Image.new("RGBA", (4, 3), (255, 0, 0, 255))
    made.putpixel((1, 1), (0, 0, 0, 0))
    return made


REFUSED = {
    "32-bit integers": ("1.tif", lambda: image(np.int32, RAMP * 99999), {}, "pixels of mode I with unknown scale"),
    "floats above 1": ("1.tif", lambda: image(np.float32, RAMP * 255), {}, "floats from 0 to 255"),
    "floats that are NaN": ("1.tif", lambda: image(np.float32, RAMP / RAMP.sum() * np.nan), {}, "floats from nan"),
    "LAB": ("1.tif", lambda: Image.new("LAB", (4, 3)), {}, "pixels of mode LAB"),
    "transparent pixels": ("1.png", transparent, {}, "transparent pixels"),
    "a transparent colour": ("1.png", lambda: Image.new("P", (4, 3)), {"transparency": 0}, "transparent pixels"),
    "frames": (
        "1.tif",
        lambda: Image.new("L", (4, 3)),
        {"save_all": True, "append_images": [Image.new("L", (4, 3))]},
        "2 frames",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_image_without_a_clear_scale_is_refused(tmp_path, kind):
    name, make, options, message = REFUSED[kind]
    with pytest.raises(BatchbayesError, match=rf"an image in .*{name}; got {message}"):
        read(tmp_path, make(), name, **options)


@pytest.mark.parametrize(
    ("tag", "before", "after", "message"),
    [(262, 1, 0, "16 bits, photometric 0"), (258, 16, 12, "12 bits")],
)
def test_16_bits_that_mean_something_else_are_refused(tmp_path, tag, before, after, message):
    path = tmp_path / "1.tif"
    image(np.uint16, RAMP * 4095).save(path)
    entry = [tag.to_bytes(2, "little") + b"\3\0\1\0\0\0" + value.to_bytes(2, "little") for value in (before, after)]
    assert path.read_bytes().count(entry[0]) == 1
    path.write_bytes(path.read_bytes().replace(*entry))
    with pytest.raises(BatchbayesError, match=rf"1\.tif; got {message}"):
        read_image(path)


@pytest.mark.parametrize("name", ["1.png", "1.jpg", "1.webp", "1.bmp", "1.tif"])
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.9])
def test_a_truncated_image_is_named(tmp_path, name, share):
    noise = np.random.default_rng(0).integers(0, 256, (60, 50, 3))
    image(np.uint8, noise).save(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(BatchbayesError, match=rf"{name}; got a damaged file"):
        list(read_examples(tmp_path))


def test_a_damaged_png_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (20, 20, 3))
    image(np.uint8, noise).save(tmp_path / "1.png")
    expected, content = read_image(tmp_path / "1.png"), (tmp_path / "1.png").read_bytes()
    for place in range(8, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 0x55
        (tmp_path / "2.png").write_bytes(changed)
        refusal = ""
        try:
            assert torch.equal(read_image(tmp_path / "2.png"), expected)  # a change of what does not matter
        except BatchbayesError as error:
            refusal = str(error)
        assert refusal == "" or "2.png; got " in refusal


@pytest.mark.parametrize("size", [(10_000, 9_000), (20_000, 20_000)])
def test_an_image_bomb_is_refused(tmp_path, size):
    Image.new("1", size).save(tmp_path / "1.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the smaller one is only a warning for pillow
        with pytest.raises(BatchbayesError, match=r"1\.png; got too many pixels"):
            read_image(tmp_path / "1.png")
    with pytest.raises(BatchbayesError, match=r"1\.png; got too many pixels"):
        read_image(tmp_path / "1.png")
