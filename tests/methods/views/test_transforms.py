"""Ready transforms against views written by hand, and their inverses."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import batchbayes as bb
from batchbayes.methods.views.with_views import READY, from_header, to_header

ALL = [
    bb.RandomCrop(3, fill=(0.1, 0.2)),
    bb.RandomFlip(),
    bb.RandomShiftScale(0.1, 0.25, fill=0.5),
    bb.TableJitter(0.1, (1.0, 2.0, 0.0)),
    bb.SignalShift(3, fill=0.5),
    bb.SignalCrop(0.8),
    bb.SignalNoise(0.1, (1.0, 2.0)),
    bb.RandomFlip(layout="NHWC"),
    bb.Compose(bb.RandomFlip(), bb.RandomCrop(1), bb.RandomShiftScale()),
]


def moved_back(transform, outputs, inputs, numbers):
    return transform.back(outputs, inputs, transform.row(numbers))


def images(count=3, channels=2, height=8, width=10):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("number", "offset"), [(0.0, -2), (0.19, -2), (0.2, -1), (0.5, 0), (0.999, 2)])
def test_a_crop_is_a_cut_of_the_padded_image(number, offset):
    x = images()
    seen = bb.RandomCrop(2, fill=-1.0).apply(x, torch.tensor([number, 0.7]))
    padded = F.pad(x, [2] * 4, value=-1.0)
    assert torch.equal(seen, padded[..., 2 + offset : 10 + offset, 3:13])


def test_the_fill_may_differ_between_channels():
    seen = bb.RandomCrop(2, fill=(3.0, -3.0)).apply(images(), torch.zeros(2))
    assert (seen[:, 0, :2] == 3).all()
    assert (seen[:, 1, :, :2] == -3).all()


def test_bytes_can_be_cropped():
    x = (images() * 255).byte()
    assert bb.RandomCrop(1).apply(x, torch.tensor([0.5, 0.5])).equal(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_exact_as_its_digits(dtype):
    x, shift = images(1, 2, 224, 224).to(dtype), bb.RandomShiftScale(0.1, 0.1, fill=0.5)
    row = shift.row(torch.tensor([0.8, 0.3, 0.7], dtype=torch.float64))
    for change in (shift.view, shift.undo):
        found, expected = change(x, row), change(x.double(), row)
        torch.testing.assert_close(found.double(), expected, atol=2 * torch.finfo(dtype).eps, rtol=0)


def test_a_flip_mirrors_left_and_right():
    x = images()
    assert torch.equal(bb.RandomFlip().apply(x, torch.tensor([0.49])), x.flip(-1))
    assert torch.equal(bb.RandomFlip().apply(x, torch.tensor([0.5])), x)


def test_a_shift_by_whole_pixels_moves_the_image():
    x, shift = images(), bb.RandomShiftScale(0.2, 0.0, fill=7.0)
    seen = shift.apply(x, torch.tensor([1.0, 0.5, 0.5], dtype=torch.float64))  # 0.2 of 10 pixels to the right
    torch.testing.assert_close(seen[..., 2:], x[..., :-2])
    torch.testing.assert_close(seen[..., :2], torch.full_like(x[..., :2], 7.0))


def test_a_zoom_enlarges_a_ramp():
    ramp = torch.linspace(-1, 1, 41).expand(1, 1, 41, 41)
    seen = bb.RandomShiftScale(0.0, 0.25).apply(ramp, torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(seen, ramp / 1.25, atol=1e-5, rtol=0)
    small = bb.RandomShiftScale(0.0, 0.25).apply(ramp, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    torch.testing.assert_close(small[..., 6:-6, 6:-6], 1.25 * ramp[..., 6:-6, 6:-6], atol=1e-5, rtol=0)


@pytest.mark.parametrize("transform", [ALL[1], bb.RandomCrop(2), bb.Compose(bb.RandomCrop(2), bb.RandomFlip())])
@pytest.mark.parametrize("seed", range(6))
def test_undone_it_is_the_image_where_the_view_saw_it(transform, seed):
    x, numbers = images(width=8), torch.rand(transform.size, generator=torch.Generator().manual_seed(seed))
    back = transform.back(transform.apply(x, numbers), x, transform.row(numbers))
    assert torch.equal(back[..., 2:-2, 2:-2], x[..., 2:-2, 2:-2])
    assert torch.equal(moved_back(transform, transform.apply(x[:, 0], numbers), x[:, 0], numbers), back[:, 0])


@pytest.mark.parametrize("seed", range(6))
def test_a_smooth_image_comes_back_from_shift_and_scale(seed):
    rows, columns = torch.linspace(-1, 1, 40)[:, None], torch.linspace(-1, 1, 60)
    x = torch.stack([rows + 2 * columns, rows * columns]).expand(1, 2, 40, 60)
    transform = bb.Compose(bb.RandomShiftScale(0.1, 0.2), bb.RandomFlip())
    numbers = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    back = transform.back(transform.apply(x, numbers), x, transform.row(numbers))
    torch.testing.assert_close(back[..., 8:-8, 12:-12], x[..., 8:-8, 12:-12], atol=0.005, rtol=0)
    assert (transform.apply(x, numbers) - x).abs()[..., 8:-8, 12:-12].max() > 0.05


def test_an_undone_crop_repeats_its_edge():
    x = images()
    top = torch.tensor([0.0, 0.5])  # the crop sees two rows of padding, and misses the last two rows
    back = moved_back(bb.RandomCrop(2), bb.RandomCrop(2, fill=9.0).apply(x, top), x, top)
    assert torch.equal(back[..., :-2, :], x[..., :-2, :])
    assert torch.equal(back[..., -2:, :], x[..., -3:-2, :].expand(-1, -1, 2, -1))


def test_jitter_has_the_standard_deviations_that_it_says():
    x = torch.zeros(2, 2)
    jitter = bb.TableJitter.of(torch.tensor([[0.0, 0.0], [2.0, 20.0]]), 0.5)
    assert jitter.std == pytest.approx((1.0, 10.0))
    views = torch.stack([jitter(x, torch.Generator().manual_seed(s)) for s in range(4000)])  # (4000, 2, 2)
    assert torch.equal(views[:, 0], views[:, 1])
    error = 4 * (2 * 4000) ** -0.5  # four standard errors of a standard deviation, relative
    torch.testing.assert_close(views[:, 0].std(0), 0.5 * torch.tensor(jitter.std), rtol=error, atol=0)
    assert (views[:, 0].mean(0).abs() < 4 * 0.5 * torch.tensor(jitter.std) * 4000**-0.5).all()


def test_columns_without_spread_are_left_alone():
    seen = ALL[3](torch.ones(4, 3), torch.Generator().manual_seed(1))
    assert (seen[:, 2] == 1).all()
    assert (seen[:, :2] != 1).all()


@pytest.mark.parametrize("transform", ALL, ids=lambda transform: type(transform).__name__)
def test_a_transform_survives_json(transform):
    parts = json.loads(json.dumps(to_header(transform)))
    assert from_header(parts) == transform


def test_every_ready_transform_is_tried_above():
    assert {type(each).__name__ for each in ALL} == {*READY, "Compose"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bb.RandomCrop(0), "padding as a whole number of at least 1; got padding=0"),
        (lambda: bb.RandomCrop(1.5), "padding as a whole number of at least 1; got padding=1.5"),
        (lambda: bb.RandomCrop(1, fill=float("nan")), "a finite fill value"),
        (lambda: bb.RandomCrop(1, fill=()), "a finite fill value"),
        (lambda: bb.RandomShiftScale(0.0, 0.0), "not both 0"),
        (lambda: bb.RandomShiftScale(0.5), "a shift from 0 to 0.5"),
        (lambda: bb.TableJitter(0.0, (1.0,)), "amount above 0"),
        (lambda: bb.TableJitter(0.1, 1.0), r"one for each training column or channel; got 1\.0"),  # type: ignore[arg-type]
        (lambda: bb.TableJitter("much", (1.0,)), "amount above 0"),
        (lambda: bb.TableJitter.of(np.zeros(4), 0.1), "finite standard deviations that are not all 0"),
        (lambda: bb.TableJitter(0.1, ()), "standard deviations that are not all 0"),
        (lambda: bb.TableJitter(0.1, (0.0,)), "standard deviations that are not all 0"),
        (lambda: bb.TableJitter.of(torch.ones(1, 2), 0.1), "standard deviations that are not all 0"),
        (lambda: bb.Compose(), "one ready transform or more; got none"),
        (lambda: bb.Compose(lambda x, g: x), "one ready transform or more; got function"),
        (lambda: bb.RandomCrop(8)(images(), None), r"images larger than the padding of 8 .*\(3, 2, 8, 10\)"),
        (lambda: bb.RandomCrop(2, fill=(1.0,))(images(), None), r"images \(N, 1, H, W\)"),
        (
            lambda: bb.RandomCrop(2)(torch.zeros(4, 3), None),
            r"images NCHW for RandomCrop.*; got inputs of shape \(4, 3\)",
        ),
        (
            lambda: bb.RandomCrop(2, fill=-1)(images().byte(), None),
            "fill values that they can hold for RandomCrop; got .*torch.uint8.* -1",
        ),
        (lambda: bb.RandomCrop(2, fill=(0.4, 300.0))(images().byte(), None), "fill values that they can hold"),
        (lambda: bb.RandomFlip()(torch.zeros(4, 3), None), "for RandomFlip"),
        (lambda: bb.RandomShiftScale()(images()[0], None), "for RandomShiftScale"),
        (lambda: bb.RandomShiftScale()(images().byte(), None), "floating-point inputs for RandomShiftScale"),
        (lambda: ALL[3](torch.zeros(4, 2), None), r"a table \(N, 3\).*got inputs of shape \(4, 2\)"),
        (lambda: ALL[3](torch.zeros(4, 3).int(), None), "floating-point inputs for TableJitter"),
        (lambda: from_header([{"name": "RandomCorp", "padding": 4}]), "did you mean RandomCrop"),
    ],
)
def test_each_has_its_message(make, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        make()


def colours_last(count=3, height=8, width=10):
    return images(count, 3, height, width).movedim(1, -1)


@pytest.mark.parametrize(
    "make", [bb.RandomFlip, lambda **o: bb.RandomCrop(2, (0.1, 0.2, 0.3), **o), bb.RandomShiftScale]
)
def test_images_with_colours_last_are_refused_or_told(make):
    x, numbers = colours_last(), torch.tensor([0.2, 0.9, 0.6], dtype=torch.float64)
    for odd in (x, colours_last(2, 12, 12), torch.rand(2, 12, 12, 6), torch.rand(2, 12, 5000)):
        with pytest.raises(bb.BatchbayesError, match=r'images NCHW for Random.*layout="NHWC".*SignalShift'):
            make().apply(odd, numbers[: make().size])
    told, plain = make(layout="NHWC"), make()
    numbers = numbers[: told.size]
    seen = told.apply(x, numbers)
    assert torch.equal(seen, plain.apply(x.movedim(-1, 1), numbers).movedim(1, -1))
    assert torch.equal(
        moved_back(told, seen, x, numbers), plain.undo(seen.movedim(-1, 1), plain.row(numbers)).movedim(1, -1)
    )
    assert torch.equal(
        moved_back(told, x[..., 0], x, numbers), plain.undo(x[..., 0], plain.row(numbers))
    )  # maps (N, H, W)
    assert torch.equal(moved_back(told, x[:, :1, :1], x, numbers), x[:, :1, :1])  # pooled
    with pytest.raises(bb.BatchbayesError, match=r"the size of the inputs, \(8, 10\)"):
        moved_back(told, x[:, ::2, ::2], x, numbers)
    with pytest.raises(bb.BatchbayesError, match="images NHWC for Random"):
        told.apply(x[..., 0], numbers)
    with pytest.raises(bb.BatchbayesError, match='layout="NCHW"'):
        make(layout="HWC").apply(x, numbers)


def test_square_images_without_channels_are_images():
    x, numbers = images(width=8)[:, 0], torch.tensor([0.2, 0.9, 0.6], dtype=torch.float64)
    for transform in (bb.RandomFlip(), bb.RandomCrop(2), bb.RandomShiftScale()):
        own = numbers[: transform.size]
        torch.testing.assert_close(transform.apply(x, own), transform.apply(x[:, None], own)[:, 0])


LEADS = torch.arange(2 * 3 * 8.0).view(2, 3, 8)  # two signals of three leads


def test_a_shift_of_signals_moves_all_leads_in_time():
    earlier, none = torch.tensor([0.99]), torch.tensor([0.5])
    seen = bb.SignalShift(2, fill=-1.0).apply(LEADS, earlier)
    assert torch.equal(seen[..., :6], LEADS[..., 2:])
    assert (seen[..., 6:] == -1).all()
    assert torch.equal(bb.SignalShift(2).apply(LEADS, none), LEADS)
    back = moved_back(bb.SignalShift(2), seen, LEADS, earlier)
    assert torch.equal(back[..., 2:], LEADS[..., 2:])
    steps_first = moved_back(bb.SignalShift(2), seen.mT[..., :2], LEADS, earlier)  # steps, and then classes
    assert torch.equal(steps_first, back.mT[..., :2])
    assert torch.equal(moved_back(bb.SignalShift(2), seen[..., 0], LEADS, earlier), seen[..., 0])
    assert torch.equal(moved_back(bb.SignalShift(2), seen[:, 1], LEADS, earlier), back[:, 1])  # a number a step
    with pytest.raises(bb.BatchbayesError, match=r"the size of the inputs, \(8,\)"):
        moved_back(bb.SignalShift(2), seen[..., ::2], LEADS, earlier)


def test_noise_of_signals_is_its_own_for_each_example_and_as_large_as_it_says():
    signals = torch.randn(500, 2, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10.0]])
    noise = bb.SignalNoise.of(signals, 0.5)
    (view, other) = (noise.apply(signals, torch.tensor([n], dtype=torch.float64)) for n in (0.3, 0.4))
    added = view - signals
    error = 4 * (2 * 500 * 40) ** -0.5  # four standard errors of a standard deviation, relative
    torch.testing.assert_close(added.std((0, 2)), 0.5 * signals.std((0, 2), correction=0), rtol=error, atol=0)
    together = torch.corrcoef(added[:, 0])  # examples do not share their noise
    assert together.fill_diagonal_(0).abs().max() < 0.8
    assert not torch.equal(view, other)
    assert torch.equal(view[7:9], noise.apply(signals[7:9], torch.tensor([0.3], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bb.SignalShift(0), "most as a whole number of at least 1"),
        (lambda: bb.SignalShift(8)(LEADS, None), "signals longer than the shift of 8"),
        (lambda: bb.SignalShift(2)(images(), None), r"signals \(N, L\) or \(N, channels, L\) for SignalShift"),
        (lambda: bb.SignalShift(2, fill=float("inf")), "fill .*a finite number"),
        (lambda: bb.SignalShift(2, fill=(0.0, 1.0)), "fill .*a finite number"),
        (lambda: bb.SignalCrop(1.0), "share between 0 and 1"),
        (lambda: bb.SignalCrop(0.5)(images(), None), "for SignalCrop"),
        (lambda: bb.SignalNoise(0.0, (1.0,)), "amount above 0"),
        (lambda: bb.SignalNoise(0.1, ()), "standard deviations that are not all 0"),
        (lambda: bb.SignalNoise(0.1, (1.0,))(LEADS, None), "signals of 1 channels"),
        (lambda: bb.SignalNoise(0.1, (1.0,))(LEADS[:, 0].int(), None), "floating-point inputs for SignalNoise"),
    ],
)
def test_each_view_of_signals_has_its_message(make, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        make()
