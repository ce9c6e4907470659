import torch

from batchbayes.datasets import NOISE_STD, SUPPORT, noisy_points, true_function


def test_points_lie_in_the_support_on_both_sides_of_the_gap() -> None:
    x, _ = noisy_points(1000)
    left, right = ((x >= low) & (x <= high) for low, high in SUPPORT)
    assert bool((left | right).all())
    share = float(left.double().mean())
    assert abs(share - 0.5) < 4 * (0.25 / 1000) ** 0.5  # four standard errors


def test_an_interval_gets_points_in_proportion_to_its_length() -> None:
    x, _ = noisy_points(2000, intervals=((0.0, 3.0), (10.0, 11.0)))
    share = float((x > 5).double().mean())
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5


def test_noise_has_the_stated_size_and_no_bias() -> None:
    x, y = noisy_points(4000)
    noise = y - true_function(x)
    assert abs(float(noise.mean())) < 4 * NOISE_STD / 4000**0.5
    assert abs(float(noise.std()) - NOISE_STD) < 4 * NOISE_STD / 8000**0.5


def test_the_same_seed_and_name_give_the_same_points_and_others_do_not() -> None:
    x, y = noisy_points(10, seed=3, name="test")
    again = noisy_points(10, seed=3, name="test")
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert not torch.equal(x, noisy_points(10, seed=4, name="test")[0])
    assert not torch.equal(x, noisy_points(10, seed=3, name="train")[0])
