import torch

from batchbayes.datasets import inverted, load_digits, pixel_shuffled


def test_split_holds_every_digit_once() -> None:
    data = load_digits(seed=0)
    assert (len(data.train_images), len(data.test_images)) == (1258, 539)
    assert data.train_images.shape[1:] == data.test_images.shape[1:] == (1, 8, 8)
    whole, other = (torch.cat([d.train_images, d.test_images]).flatten(1) for d in (data, load_digits(seed=1)))
    assert torch.equal(whole.sort(0).values, other.sort(0).values)
    assert not torch.equal(whole, other)
    counts = torch.cat([data.train_labels, data.test_labels]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_labels_stay_with_their_images() -> None:
    from sklearn.datasets import load_digits as bundled

    pixels, labels = bundled(return_X_y=True)
    known = {tuple(row): int(label) for row, label in zip((pixels / 16).tolist(), labels, strict=True)}
    data = load_digits(seed=5)
    for images, targets in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        assert [known[tuple(row)] for row in images.flatten(1).tolist()] == targets.tolist()


def test_ink_is_scaled_to_one() -> None:
    images = load_digits().train_images
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    torch.testing.assert_close(inverted(images) + images, torch.ones_like(images))


def test_shuffling_keeps_each_images_pixels_and_uses_a_different_order_for_each() -> None:
    images = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(5, 1, 1, 1)
    shuffled = pixel_shuffled(images, seed=2)
    assert shuffled.shape == images.shape
    assert torch.equal(shuffled.flatten(1).sort(1).values, images.flatten(1))
    assert len({tuple(row) for row in shuffled.flatten(1).tolist()}) == 5
    assert torch.equal(shuffled, pixel_shuffled(images, seed=2))
    assert not torch.equal(shuffled, pixel_shuffled(images, seed=3))
