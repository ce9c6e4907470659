"""What one exact draw costs, in plain forward passes, and three ideas to make it cheaper than one.

    python benchmarks/draw_cost.py DATA_FOLDER

A public ResNet-20, CIFAR-10 images in chunks of 64, one thread, CPU time, medians of interleaved runs. "folded" scales
the kernel of each convolution by the statistics of the draw and drops the batch-norm layers; "channels last" also uses
that memory format for images and kernels; "compiled" runs one `torch.compile`d forward pass with the statistics as
inputs. The ideas change the last digits of the outputs, so they are measured here and not used by the library.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from batchbayes_papers.data import cifar10
from batchbayes_papers.data.folder import data_file
from batchbayes_papers.models.pretrained import cifar_resnet
from torch import Tensor, nn

import batchbayes as bb


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def convolutions_before(network: nn.Module, example: Tensor) -> dict[str, str]:
    """Return the name of the convolution whose output each batch-norm layer normalises."""
    made: dict[int, str] = {}
    pairs: dict[str, str] = {}
    handles = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            handles.append(module.register_forward_hook(lambda m, i, o, name=name: made.update({id(o): name})))
        if isinstance(module, nn.BatchNorm2d):
            hook = lambda m, i, name=name: pairs.update({name: made[id(i[0])]})  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
    network(example)
    for handle in handles:
        handle.remove()
    return pairs


class Folded:
    """A copy of the network without batch norm, whose kernels carry the statistics of a draw."""

    def __init__(self, network: nn.Module, example: Tensor, memory_format: torch.memory_format) -> None:
        self.format = memory_format
        self.network = copy.deepcopy(network).to(memory_format=memory_format)  # type: ignore[call-overload]
        self.pairs = []
        for norm_name, conv_name in convolutions_before(network, example).items():
            norm, conv = network.get_submodule(norm_name), self.network.get_submodule(conv_name)
            conv.bias = nn.Parameter(torch.zeros(norm.num_features))
            self.network.set_submodule(norm_name, nn.Identity())
            self.pairs.append((norm_name, norm, conv, conv.weight.detach().clone(memory_format=memory_format)))

    def __call__(self, statistics_: dict[str, Tensor], images: Tensor) -> Tensor:
        for name, norm, conv, kernel in self.pairs:
            scale = (statistics_[f"{name}.running_var"] + norm.eps).rsqrt() * norm.weight
            conv.weight.copy_(kernel * scale[:, None, None, None])
            conv.bias.copy_(norm.bias - statistics_[f"{name}.running_mean"] * scale)
        return self.network(images)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, _ = cifar10.load_cifar10("train", options.folder, 2000)
    images = cifar10.standardise(cifar10.load_cifar10("test", options.folder, 256)[0]).split(64)
    network = cifar_resnet(20, data_file("weights/resnet20_cifar10_akamaster.safetensors", options.folder)).eval()
    posterior = bb.mcbn(network, cifar10.augmented_batches(train, 128), num_samples=8)
    drawn = posterior.draw(0, 0)
    given = drawn.keywords["tensors"]  # type: ignore[attr-defined]
    last = tuple(part.contiguous(memory_format=torch.channels_last) for part in images)
    folded = Folded(network, images[0], torch.contiguous_format)
    folded_last = Folded(network, images[0], torch.channels_last)
    own = copy.deepcopy(network)
    compiled = torch.compile(lambda tensors, x: torch.func.functional_call(own, tensors, (x,)))
    ways: dict[str, Callable[[], list[Tensor]]] = {
        "a draw": lambda: [posterior.draw(0, 0)(part) for part in images],
        "folded": lambda: [folded(given, part) for part in images],
        "folded, channels last": lambda: [folded_last(given, part) for part in last],
        "compiled": lambda: [compiled(given, part) for part in images],
    }
    expected = ways["a draw"]()
    print("| one draw of 256 images | plain passes | largest difference of a logit |\n|---|---|---|")
    for name, way in ways.items():
        outputs = way()
        plain = lambda: [network(part) for part in images]  # noqa: E731
        plain()
        ratios = []
        for _ in range(options.repeats):
            before = seconds(plain)
            ratios.append(2 * seconds(way) / (before + seconds(plain)))
        difference = max(float((a - b).abs().max()) for a, b in zip(outputs, expected, strict=True))
        print(f"| {name} | {statistics.median(ratios):.3f} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main()
