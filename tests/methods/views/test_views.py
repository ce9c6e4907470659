"""Views around posteriors: what a draw is, how draws are spread, maps that are moved back, and own functions."""

import json
import subprocess
import sys
import threading

import pytest
import torch
from helpers.cases import CROP_AND_FLIP, NETWORKS
from helpers.references import left_alone
from torch import Tensor, nn

import batchbayes as bb
from batchbayes._common.rng import even_numbers

CASE = NETWORKS["BatchNorm2d"]


class Blank(nn.Module):
    """A stand-in for a segmentation network: it scores each pixel by the pixel itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], 1)


class Shrink(nn.AvgPool2d):
    """A stand-in for a network whose maps are smaller than its inputs."""


def brighter(inputs: Tensor, generator: torch.Generator) -> Tensor:
    return inputs * (0.5 + torch.rand(1, generator=generator).to(inputs))


def rolled(inputs: Tensor, generator: torch.Generator) -> Tensor:
    return inputs.roll(int(torch.randint(1, 8, (1,), generator=generator)), -1)


def rolled_back(outputs: Tensor, generator: torch.Generator) -> Tensor:
    return outputs.roll(-int(torch.randint(1, 8, (1,), generator=generator)), -1)


@pytest.fixture
def network():
    return CASE.network()


@pytest.fixture
def x():
    return CASE.batches(1, size=5, seed=4)[0]


@torch.no_grad()
def test_a_draw_is_a_view_and_then_a_draw(network, x):
    inner = bb.mcbn(network, CASE.batches(12))
    posterior = bb.with_views(inner, CROP_AND_FLIP)
    for index in (0, 3, 70):
        view = CROP_AND_FLIP.apply(x, even_numbers(5, index, 3))
        assert torch.equal(posterior.draw(5, index)(x), inner.draw(5, index)(view))
    assert not bb.with_views(bb.deterministic(network), CROP_AND_FLIP).is_point


@torch.no_grad()
@pytest.mark.parametrize("transform", [CROP_AND_FLIP, brighter])
def test_an_average_is_the_mean_of_consecutive_draws(network, x, transform, tmp_path):
    inner = bb.mcbn(network, CASE.batches(12))
    single, averaged = bb.with_views(inner, transform), bb.with_views(inner, transform, average=3)
    for index in (0, 2):
        expected = torch.stack([single.draw(5, 3 * index + step)(x) for step in range(3)]).mean(0)
        torch.testing.assert_close(averaged.draw(5, index)(x), expected)
    bb.save(averaged, tmp_path / "views")
    loaded = bb.load(tmp_path / "views", network, **({} if transform is CROP_AND_FLIP else {"transform": brighter}))
    assert loaded.average == 3
    assert torch.equal(loaded.draw(5, 2)(x), averaged.draw(5, 2)(x))


def test_sixteen_draws_cover_flips_and_offsets_evenly():
    grid = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))[None]  # row and column
    posterior = bb.with_views(bb.deterministic(nn.Flatten()), bb.Compose(bb.RandomCrop(3), bb.RandomFlip()))
    seen = torch.stack([posterior.draw(3, s)(grid) for s in range(16)]).view(16, 2, 8, 8)
    mirrored = seen[:, 1, 4, 3] > seen[:, 1, 4, 4]
    assert mirrored.sum() == 8
    assert all(mirrored[2 * pair] != mirrored[2 * pair + 1] for pair in range(8))
    rows = torch.where(mirrored, seen[:, 0, 4, 3], seen[:, 0, 4, 4])
    assert set(torch.bincount(rows.long(), minlength=8)[1:].tolist()) == {2, 3}  # 7 offsets


def test_a_seed_has_its_own_views(network, x):
    posterior = bb.with_views(bb.deterministic(network), bb.RandomCrop(2))
    draws = [bb.predict(posterior, x, bb.categorical(), num_samples=4, seed=s, keep_draws=True).draws for s in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])


@pytest.mark.parametrize(
    "transform", [bb.Compose(bb.RandomCrop(2), bb.RandomFlip()), bb.Compose(bb.RandomFlip(), bb.RandomCrop(2))]
)
def test_maps_are_moved_back_before_they_are_averaged(transform):
    x = torch.rand(3, 1, 9, 11)
    posterior = bb.with_views(bb.deterministic(Blank()), transform)
    draws = bb.predict(posterior, x, bb.categorical(), num_samples=16, keep_draws=True).draws  # (S, N, 2, H, W)
    expected = torch.cat([x, -x], 1)[..., 2:-2, 2:-2].expand(16, -1, -1, -1, -1)
    assert torch.equal(draws[..., 2:-2, 2:-2], expected)


@pytest.mark.parametrize("network", [nn.Identity(), nn.Unflatten(1, (1, 9))])
def test_maps_of_images_without_channels_are_moved_back_too(network):
    x = torch.rand(3, 9, 11)  # (N, H, W)
    transform = bb.Compose(bb.RandomFlip(layout="NHW"), bb.RandomCrop(2, layout="NHW"))
    posterior = bb.with_views(bb.deterministic(network), transform)
    draws = bb.predict(posterior, x, bb.gaussian(1.0), num_samples=8, keep_draws=True).draws[..., 2:-2, 2:-2]
    assert torch.equal(draws, network(x)[..., 2:-2, 2:-2].expand_as(draws))


def test_maps_of_another_size_are_refused():
    posterior = bb.with_views(bb.deterministic(Shrink(2)), bb.RandomFlip())
    with pytest.raises(bb.BatchbayesError, match=r"maps of the size of the inputs, \(8, 8\).*got .*\(2, 3, 4, 4\)"):
        posterior.draw(0, 0)(torch.rand(2, 3, 8, 8))
    pooled = bb.with_views(bb.deterministic(nn.AdaptiveAvgPool2d(1)), bb.RandomFlip())
    assert pooled.draw(0, 0)(torch.rand(2, 3, 8, 8)).shape == (2, 3, 1, 1)


def test_an_own_function_on_maps_needs_its_inverse():
    x = torch.rand(2, 1, 4, 8)
    with pytest.raises(bb.BatchbayesError, match="undo= for the transform rolled, because the network returns maps"):
        bb.with_views(bb.deterministic(Blank()), rolled).draw(0, 0)(x)
    posterior = bb.with_views(bb.deterministic(Blank()), rolled, undo=rolled_back)
    for index in range(4):
        assert torch.equal(posterior.draw(0, index)(x), torch.cat([x, -x], 1))


@pytest.mark.parametrize(
    "network", [nn.Conv1d(3, 5, 1), nn.Linear(9, 5), nn.Sequential(nn.Flatten(), nn.Linear(27, 5))]
)
@torch.no_grad()
def test_sequences_are_moved_back_by_an_own_function_and_by_no_ready_one(network):
    x, where = torch.rand(2, 3, 9), 1 if isinstance(network, nn.Linear) else -1  # (N, C, L), or (N, L, C)

    def mirrored(values, generator):
        return values.flip(where)

    found = bb.with_views(bb.deterministic(network), mirrored, undo=mirrored).draw(0, 0)(x)
    if isinstance(network, nn.Sequential):  # a class for each example, and no positions
        assert torch.equal(found, network(x.flip(-1)))
        return
    torch.testing.assert_close(found, network(x))
    with pytest.raises(bb.BatchbayesError, match="undo= for the transform mirrored"):
        bb.with_views(bb.deterministic(network), mirrored).draw(0, 0)(x)
    with pytest.raises(
        bb.BatchbayesError, match=r"images NCHW for RandomFlip.*got inputs of shape \(2, 3, 9\).*SignalShift"
    ):
        bb.with_views(bb.deterministic(network), bb.RandomFlip()).draw(0, 0)(x)


@torch.no_grad()
@pytest.mark.parametrize("network", [nn.Identity(), nn.Unflatten(1, (1, 9))])
def test_signals_without_channels_are_moved_back_too(network):
    x = torch.rand(2, 9)
    posterior = bb.with_views(bb.deterministic(network), rolled, undo=rolled_back)
    assert torch.equal(posterior.draw(0, 3)(x), network(x))


@pytest.mark.parametrize(
    ("undo", "message"),
    [
        (lambda outputs: outputs, r"a function undo=<lambda> that takes \(inputs, generator\)"),
        (lambda outputs, _: None, "a tensor from the function undo=<lambda>; got NoneType"),
        (lambda outputs, _: outputs[:1], r"the same shape from .*: \(3, 2, 4, 8\); got \(1, 2, 4, 8\)"),
        (lambda outputs, _: outputs.long(), "the same dtype from .*; got torch.int64"),
    ],
)
def test_a_bad_inverse_is_refused(undo, message):
    posterior = bb.with_views(bb.deterministic(Blank()), rolled, undo=undo, average=2)
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.predict(posterior, torch.rand(3, 1, 4, 8), bb.categorical(), num_samples=2)


class Flip:
    """Called as torchvision's v2.RandomHorizontalFlip is: with a batch alone, and random by the global generator."""

    def __call__(self, images: Tensor) -> Tensor:
        return images.flip(-1) if torch.rand(1) < 0.5 else images


class Affine:
    """As torchvision draws the parameters of v2.RandomAffine and of v2.RandomCrop."""

    def __call__(self, images: Tensor) -> Tensor:
        scale, rows = float(torch.empty(1).uniform_(0.5, 1.5)), int(torch.randint(0, 3, size=(1,)))
        return (scale * images).roll(rows, -2)[:, torch.randperm(2)]


def test_transforms_of_torchvision_use_the_generator_of_the_view(network, x):
    for transform, distinct in ((Flip(), 2), (Affine(), 12)):
        posterior = bb.with_views(bb.deterministic(network), bb.torchvision_transform(transform))
        before = torch.get_rng_state()
        draws = bb.predict(posterior, x, bb.categorical(), num_samples=12, keep_draws=True).draws
        assert torch.equal(torch.get_rng_state(), before)
        assert len(draws.flatten(1).unique(dim=0)) == distinct
        again = bb.predict(posterior, x, bb.categorical(), num_samples=12, keep_draws=True, chunk_size=2).draws
        torch.testing.assert_close(draws, again, atol=1e-5, rtol=1e-5)
    with pytest.raises(bb.BatchbayesError, match="a transform of torchvision"):
        bb.torchvision_transform("flip")


def test_threads_with_own_functions_and_torchvision_do_not_disturb_each_other(network, x):
    posteriors = [bb.with_views(bb.deterministic(network), t) for t in (brighter, bb.torchvision_transform(Affine()))]

    def work():
        torch.rand(3)  # another user of the global generator
        return [bb.predict(p, x, bb.categorical(), num_samples=6).probs for p in posteriors]

    alone, found = work(), []
    threads = [threading.Thread(target=lambda: found.extend(work() for _ in range(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, alone, strict=True))


def smaller(inputs, generator):
    return inputs[..., 1:]


def doubled(inputs, generator):
    return torch.cat([inputs, inputs])


def with_nan(inputs, generator):
    return inputs / 0 * 0


def in_doubles(inputs, generator):
    return inputs.double()


def elsewhere(inputs, generator):
    return inputs.to("meta")


def to_lists(inputs, generator):
    return inputs.tolist()


def by_global_numbers(inputs, generator):
    return inputs * torch.rand(1)


def row_by_row(inputs, generator):
    return inputs * torch.rand(len(inputs), 1, 1, 1, generator=generator)


def by_the_batch(inputs, generator):
    return inputs - inputs.mean(0)


def that_fails(inputs, generator):
    raise RuntimeError("no such view")


def of_pairs(inputs, generator):
    return inputs.unflatten(0, (5, -1)).flatten(0, 1)  # fails for one example


def of_one_argument(inputs):
    return inputs


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (of_one_argument, r"a transform of_one_argument that takes \(inputs, generator\)"),
        (smaller, r"the same shape from the transform smaller: \(5, 2, 8, 8\); got \(5, 2, 8, 7\)"),
        (doubled, r"the same shape from the transform doubled: .* got \(10, 2, 8, 8\)"),
        (with_nan, "finite numbers in the view of the transform with_nan; got 640 of 640"),
        (in_doubles, "the same dtype from the transform in_doubles: torch.float32; got torch.float64"),
        (elsewhere, "the same device from the transform elsewhere: cpu; got meta"),
        (to_lists, "a tensor from the transform to_lists; got list"),
        (by_global_numbers, "the same view of an example whenever the transform by_global_numbers"),
        (row_by_row, "use one set of them for all examples"),
        (that_fails, r"a transform that_fails that works on .*\(5, 2, 8, 8\); got RuntimeError: no such view"),
        (of_pairs, r"a transform of_pairs that works on values of shape \(1, 2, 8, 8\); got RuntimeError"),
        (by_the_batch, "another view when the example came alone"),
    ],
)
def test_a_bad_function_is_refused_at_its_first_view(network, x, transform, message):
    posterior = bb.with_views(bb.deterministic(network), transform)
    with left_alone(network), pytest.raises(bb.BatchbayesError, match=message):
        bb.predict(posterior, x, bb.categorical(), num_samples=2)


@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
def test_a_function_is_checked_in_the_units_of_the_inputs(network, x, unit):
    mix = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(0))

    def blurred(inputs, generator):
        found = nn.functional.conv2d(inputs, mix, padding=1)
        return found * (1 + 1e-5 * len(inputs) / 5)  # as much as rounding may differ between batches

    bb.predict(bb.with_views(bb.deterministic(network), blurred), unit * x, bb.categorical(), num_samples=2)
    with pytest.raises(bb.BatchbayesError, match="use one set of them for all examples"):
        bb.predict(bb.with_views(bb.deterministic(network), row_by_row), unit * x, bb.categorical(), num_samples=2)


@pytest.mark.parametrize("transform", [bb.RandomFlip(), bb.TableJitter(0.1, (1.0,)), rolled])
def test_several_inputs_are_refused_in_words(network, x, transform):
    posterior = bb.with_views(bb.deterministic(network), transform)
    with pytest.raises(bb.BatchbayesError, match="a network with one input tensor, for views"):
        bb.predict(posterior, [(x, x)], bb.categorical(), inputs=(0, 1))


class Own(bb.RandomFlip):
    """A subclass that no file can name."""


@pytest.mark.parametrize(
    ("transform", "options", "message"),
    [
        (bb.RandomFlip, {}, "a transform, or a function .*got <class"),
        ("flip", {}, "a transform, or a function .*got 'flip'"),
        (Own(), {}, "a transform that a file can name: RandomCrop.*got Own"),
        (bb.RandomFlip(), {"average": 0}, "average as a whole number of at least 1; got average=0"),
        (bb.RandomFlip(), {"average": 2.5}, "got average=2.5"),
        (bb.RandomFlip(), {"undo": rolled_back}, "got rolled_back beside RandomFlip"),
        (rolled, {"undo": 3}, "undo= as a function"),
    ],
)
def test_a_bad_transform_is_refused_at_once(network, transform, options, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.with_views(bb.deterministic(network), transform, **options)


def test_views_go_around_a_posterior_once(network):
    posterior = bb.with_views(bb.deterministic(network), bb.RandomFlip())
    with pytest.raises(bb.BatchbayesError, match=r"without views; got a ViewsPosterior.*Compose"):
        bb.with_views(posterior, bb.RandomFlip())
    with pytest.raises(bb.BatchbayesError, match="got a Sequential"):
        bb.with_views(network, bb.RandomFlip())


def test_an_own_function_is_named_in_the_file_and_passed_again(network, x, tmp_path):
    posterior = bb.with_views(bb.mcbn(network, CASE.batches(6)), rolled, undo=rolled_back)
    path = tmp_path / "views"
    bb.save(posterior, path)
    loaded = bb.load(path, network, transform=rolled, undo=rolled_back)
    with torch.no_grad():
        assert torch.equal(loaded.draw(2, 3)(x), posterior.draw(2, 3)(x))
    for given, message in (
        ({}, "the function rolled as transform=; got none.*never its code"),
        ({"transform": brighter, "undo": rolled_back}, "the function rolled as transform=; got brighter"),
        ({"transform": rolled}, "the function rolled_back as undo=; got none"),
        ({"transform": rolled, "undo": rolled_back, "model2": rolled}, "kind 'views' takes; got model2="),
    ):
        with pytest.raises(bb.BatchbayesError, match=message):
            bb.load(path, network, **given)


def test_an_own_function_in_a_new_process(network, x, tmp_path):
    posterior = bb.with_views(bb.deterministic(network), brighter)
    bb.save(posterior, tmp_path / "views")
    script = f"""
import sys, torch
sys.path[:0] = {sys.path!r}
torch.set_num_threads(1)
import batchbayes as bb
from helpers.cases import NETWORKS
network = NETWORKS["BatchNorm2d"].network()
def brighter(inputs, generator):
    return inputs * (0.5 + torch.rand(1, generator=generator).to(inputs))
posterior = bb.load({str(tmp_path / "views")!r}, network, transform=brighter)
x = NETWORKS["BatchNorm2d"].batches(1, size=5, seed=4)[0]
print(bb.predict(posterior, x, bb.categorical(), num_samples=8, seed=3).probs.numpy().tobytes().hex())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    probs = bb.predict(posterior, x, bb.categorical(), num_samples=8, seed=3).probs
    assert done.stdout.strip() == probs.numpy().tobytes().hex()


def test_the_header_nests_the_wrapped_posterior(network, tmp_path):
    from safetensors import safe_open

    bb.save(bb.with_views(bb.mcbn(network, CASE.batches(6)), CROP_AND_FLIP), tmp_path / "views")
    with safe_open(tmp_path / "views", framework="pt") as file:
        header = json.loads(file.metadata()["batchbayes"])
        keys = set(file.keys())
    assert header["kind"] == "views"
    assert header["transform"] == [{"name": "RandomCrop", "padding": 2, "fill": [0.5, -0.5]}, {"name": "RandomFlip"}]
    assert (header["wrapped"]["kind"], header["wrapped"]["method"]) == ("batchnorm", "mcbn")
    assert keys == {"wrapped.center", "wrapped.deviations", "wrapped.influence"}
    with pytest.raises(bb.BatchbayesError, match="no transform=, because the file needs none; got rolled"):
        bb.load(tmp_path / "views", network, transform=rolled)
    with pytest.raises(bb.BatchbayesError, match="batch-norm layers where the file has"):
        bb.load(tmp_path / "views", nn.Sequential(nn.Conv2d(2, 2, 3)))
    bb.save(bb.deterministic(network), tmp_path / "point")
    with pytest.raises(bb.BatchbayesError, match="kind 'point' takes; got transform="):
        bb.load(tmp_path / "point", network, transform=rolled)


def test_a_file_of_views_needs_weights_only_if_the_wrapped_posterior_does(network, x, tmp_path):
    weights = [CASE.network().state_dict(), {name: 1.1 * value for name, value in network.state_dict().items()}]
    posterior = bb.with_views(bb.weight_samples(network, weights), CROP_AND_FLIP)
    expected = posterior.draw(0, 3)(x)
    bb.save(posterior, tmp_path / "views")
    other = CASE.network()
    with torch.no_grad():
        other[0].weight.add_(1.0)
    assert torch.equal(bb.load(tmp_path / "views", other).draw(0, 3)(x), expected)


def test_own_functions_inside_an_ensemble_are_not_saved(network, tmp_path):
    inside = bb.ensemble([bb.with_views(bb.deterministic(network), rolled), bb.mcbn(network, CASE.batches(6))])
    with pytest.raises(bb.BatchbayesError, match=r"functions of your own.*put the views around the ensemble"):
        bb.save(inside, tmp_path / "inside")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"average": 0}, "average as a whole number of at least 1"),
        ({"transform": []}, "one ready transform or more; got none"),
        ({"transform": [{"name": "RandomCrop"}]}, "header that does not fit"),
        ({"transform": [{"name": "RandomCrop", "padding": -1}]}, "padding as a whole number of at least 1"),
        ({"transform": [{"name": "eval", "code": "1"}]}, "a transform, one of: RandomCrop"),
        ({"wrapped": {"kind": "voodoo"}}, "got kind 'voodoo'"),
        ({"average": None}, "header that does not fit"),
        ({"wrapped": None}, "header that does not fit"),
    ],
)
def test_damaged_headers_are_refused(network, tmp_path, broken, message):
    from safetensors.torch import save_file

    header, tensors = bb.with_views(bb.mcbn(network, CASE.batches(6)), bb.RandomFlip()).state()
    document = json.dumps({"format": 1, "kind": "views", **header, **broken})
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "p", {"batchbayes": document})
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.load(tmp_path / "p", network)


def test_auto_engine_falls_back_to_exact_draws(network, x):
    posterior = bb.with_views(bb.mcbn(network, CASE.batches(6)), CROP_AND_FLIP)
    found = bb.predict(posterior, x, bb.categorical(), num_samples=4, engine="auto")
    assert found.engine == "sample: ViewsPosterior has no linear engine"
    assert torch.equal(found.probs, bb.predict(posterior, x, bb.categorical(), num_samples=4).probs)


def test_a_transform_may_work_in_place():
    images = torch.randn(5, 3, 8, 8)
    before, network = images.clone(), nn.Sequential(nn.Flatten(), nn.Linear(192, 3))

    def brighter(seen, generator):
        return seen.add_(torch.rand((), generator=generator))

    def copied(seen, generator):
        return seen + torch.rand((), generator=generator)

    found, expected = (
        bb.predict(bb.with_views(bb.deterministic(network), each), images, bb.categorical(), num_samples=4).probs
        for each in (brighter, copied)
    )
    assert torch.equal(found, expected)
    assert torch.equal(images, before)


@torch.no_grad()
def test_views_of_signals_around_a_network_of_signals():
    x = torch.randn(4, 3, 16)
    labels = bb.with_views(bb.deterministic(nn.Conv1d(3, 2, 1)), bb.SignalShift(3))  # a class for each step
    draws = torch.stack([labels.draw(0, s)(x) for s in range(8)])[..., 3:-3]
    torch.testing.assert_close(draws, labels.network(x)[..., 3:-3].expand_as(draws))
    whole = bb.Compose(bb.SignalShift(2), bb.SignalCrop(0.8), bb.SignalNoise.of(x, 0.1))
    posterior = bb.with_views(bb.deterministic(nn.Sequential(nn.Flatten(), nn.Linear(48, 5))), whole)
    torch.testing.assert_close(posterior.draw(0, 1)(x)[1:3], posterior.draw(0, 1)(x[1:3]))
    assert bb.predict(posterior, x, bb.categorical(), num_samples=8).mutual_information.min() > 0
