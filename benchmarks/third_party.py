"""MCBN on networks that nobody here wrote: timm and segmentation-models-pytorch, random weights, no downloads.

Run it with `make third-party`: it needs an environment of its own. Each network first runs a few batches in training
mode, so that its running statistics are real. Then, in float32 and in float64:

state       fitting and predicting leave the network bit-identical: parameters, gradients, buffers, modes, hooks,
            requires_grad, every other attribute of every module, and the global random streams;
own batch   a draw applied to the batch its statistics came from equals a training-mode forward pass on that batch
            (dropout and stochastic depth off);
neighbours  f(x)[:k] equals f(x[:k]).

Differences are the largest absolute one over the largest absolute output, and may reach 1e-4 in float32, 1e-9 in
float64. A network whose own training-mode forward pass in float32 is further than 1e-4 from its float64 self (the
column "rounding") cannot be judged at 1e-4: there, and only there, ten times its rounding is allowed in float32, and
the last column says so. The exit code is 1 if anything fails.
"""

import copy
import hashlib
import platform
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import batchbayes as bb
from batchbayes._common.rng import dealt
from batchbayes.network.function import pick_output
from batchbayes.tools import generator

BATCH_SIZE, ROWS, QUERIES, CLASSES = 8, 4, 5, 5
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}


@dataclass(frozen=True)
class Case:
    """A network to try: how to build it, the images it takes, and which output counts."""

    name: str
    build: Callable[[], nn.Module]
    image_size: int = 64
    output: int | None = None


@dataclass(frozen=True)
class Findings:
    """What one precision showed."""

    posterior: bb.BatchNormPosterior
    expected: Tensor
    own_batch: float
    neighbours: float
    mutual_information: float
    changed: list[str]


def define_torchvision_operators() -> torch.library.Library:
    """Declare the two operators that `import torchvision` looks for: PyPI's build cannot load its own without CUDA.

    The operators live as long as the library that is returned.
    """
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def timm_case(name: str, image_size: int = 64, **options: object) -> Case:
    """A classifier by its name in timm."""
    import timm

    return Case(
        f"timm {name}",
        lambda: timm.create_model(name, pretrained=False, num_classes=CLASSES, **options),
        image_size,
    )


def segmentation_case(decoder: str, encoder: str, *, with_label: bool = False) -> Case:
    """A segmentation network; `with_label` adds a classifier, so that it returns a tuple (mask, label)."""
    import segmentation_models_pytorch as segmentation

    options: dict[str, object] = {"aux_params": {"classes": 2}} if with_label else {}
    return Case(
        f"smp {decoder} ({encoder}{', two outputs' if with_label else ''})",
        lambda: getattr(segmentation, decoder)(encoder, encoder_weights=None, classes=CLASSES, **options),
        output=0 if with_label else None,
    )


def cases() -> list[Case]:
    """Networks with batch norm of different kinds; what each adds stands beside it."""
    return [
        timm_case("resnet18"),
        timm_case("densenet121"),  # 121 sites; norm before convolution, on concatenations
        timm_case("efficientnet_b0"),  # norm and activation fused in BatchNormAct2d; stochastic depth
        timm_case("mobilenetv3_small_100"),
        timm_case("resnetv2_50"),  # norm before activation before convolution
        timm_case("regnety_002"),
        timm_case("repvgg_a0"),  # a batch norm of its own on each of three parallel branches
        timm_case("hrnet_w18_small"),  # four resolutions that exchange features
        timm_case("ghostnet_100"),
        timm_case("inception_v3", image_size=96),
        timm_case("levit_128s", image_size=224),  # attention with batch norm over tokens; memoises in evaluation mode
        timm_case("efficientvit_m0", img_size=64),  # batch norms inside residual blocks with stochastic depth
        timm_case("visformer_tiny", img_size=64),
        segmentation_case("Unet", "resnet18"),
        segmentation_case("Unet", "timm-efficientnet-b0", with_label=True),
        segmentation_case("FPN", "resnet18"),
        segmentation_case("DeepLabV3Plus", "resnet18"),  # pooled to 1 x 1: statistics of M values alone; dropout
    ]


def images(case: Case, count: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Coloured noise on a random background each, so that batches differ."""
    stream, size = generator(seed, case.name), case.image_size
    background = torch.randn(count, 3, 1, 1, generator=stream)
    return (background + torch.randn(count, 3, size, size, generator=stream)).to(dtype)


def built(case: Case) -> nn.Module:
    """The network with real running statistics, left in training mode: the harder state to put back."""
    torch.manual_seed(0)
    model = case.build().train()
    with torch.no_grad():
        for seed in range(3):
            model(images(case, BATCH_SIZE, 100 + seed, torch.float32))
    first = next(model.parameters())
    first.requires_grad_(False)  # a state that must come back as well
    return model


def fingerprint(value: object) -> object:
    """What tells whether an attribute changed: bytes of tensors, contents of containers, identity of the rest."""
    if isinstance(value, Tensor):
        content = hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        grad = None if not value.is_leaf or value.grad is None else fingerprint(value.grad)
        return id(value), value.dtype, value.shape, value.requires_grad, value._version, content, grad
    if isinstance(value, Mapping):
        return [(key, fingerprint(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [fingerprint(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return id(value)


def snapshot(model: nn.Module) -> dict[str, object]:
    """The complete state: every attribute of every module (tensors, modes, hooks, caches), and the random streams."""
    state = {
        f"{name}.{attribute}": fingerprint(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
    }
    state["torch stream"] = fingerprint(torch.get_rng_state())[5]  # type: ignore[index]
    state["numpy stream"] = str(np.random.get_state())
    state["python stream"] = str(random.getstate())
    return state


def training_mode_forward(model: nn.Module, batch: Tensor, output: int | None) -> Tensor:
    """What a copy of the network returns in training mode, with dropout and stochastic depth off."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if "Drop" in type(module).__name__:
            module.training = False  # it alone: a residual block with stochastic depth holds batch norms too
        if hasattr(module, "drop_rate"):  # timm networks that call dropout as a function
            module.drop_rate = 0.0
    with torch.no_grad():
        outputs = model(batch)
    if output is None and isinstance(outputs, tuple):  # two heads in training, their mean in evaluation mode
        return torch.stack(outputs).mean(0)
    return pick_output(outputs, output)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference over the largest absolute value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def examine(case: Case, model: nn.Module, dtype: torch.dtype) -> Findings:
    """Fit, predict and compare, at one precision."""
    model = copy.deepcopy(model).to(dtype)
    batches = [images(case, BATCH_SIZE, seed, dtype) for seed in range(ROWS)]
    queries = images(case, QUERIES, 1000, dtype)
    expected = training_mode_forward(model, batches[1], case.output)
    before = snapshot(model)
    posterior = bb.mcbn(model, batches, num_samples=ROWS, seed=0, output=case.output)
    predictive = bb.predict(posterior, queries, bb.categorical(), num_samples=ROWS, seed=0)
    drawn = posterior.draw(0, next(index for index in range(ROWS) if dealt(0, index, ROWS) == 1))
    with torch.no_grad():
        own_batch = relative_difference(drawn(batches[1]), expected)
        neighbours = relative_difference(drawn(queries[:2]), drawn(queries)[:2])
    after = snapshot(model)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return Findings(posterior, expected, own_batch, neighbours, float(predictive.mutual_information.mean()), changed)


def rounding(found: Mapping[torch.dtype, Findings]) -> float:
    """How far float32 takes the network's own training-mode forward pass from float64: none of our doing."""
    return relative_difference(found[torch.float32].expected.double(), found[torch.float64].expected)


def remarks(found: Mapping[torch.dtype, Findings]) -> tuple[list[str], list[str]]:
    """What is wrong, and what else must be said; nothing if all is well."""
    wrong, said, own_rounding = [], [], rounding(found)
    for dtype, findings in found.items():
        precision, tolerance = str(dtype).removeprefix("torch."), TOLERANCES[dtype]
        if dtype == torch.float32 and own_rounding > tolerance:
            tolerance = 10 * own_rounding
            said.append(f"{precision} judged at {tolerance:.0e}")
        for what in ("own_batch", "neighbours"):
            if not getattr(findings, what) <= tolerance:
                wrong.append(f"{what} {getattr(findings, what):.0e} in {precision}")
        if findings.changed:
            wrong.append(f"changed in {precision}: {', '.join(findings.changed[:3])} ({len(findings.changed)} in all)")
        if not findings.mutual_information > 0:
            wrong.append(f"no mutual information in {precision}")
    return wrong, said


def kinds(posterior: bb.BatchNormPosterior) -> str:
    """The classes of the sites, such as "40 BatchNormAct2d, 9 BatchNorm2d"."""
    count = Counter(type(site.layer).__name__ for site in posterior.sites)
    return ", ".join(f"{number} {name}" for name, number in count.most_common())


def line(case: Case) -> tuple[str, bool]:
    """One line of the table, and whether all is well."""
    start = time.perf_counter()
    try:
        model = built(case)
        found = {dtype: examine(case, model, dtype) for dtype in TOLERANCES}
    except Exception as error:
        return f"| {case.name} | | | | | | | | {type(error).__name__}: {str(error)[:300]} |", False
    seconds = time.perf_counter() - start
    (wrong, said), single, double = remarks(found), found[torch.float32], found[torch.float64]
    own, neighbours = (
        f"{getattr(single, what):.0e} / {getattr(double, what):.0e}" for what in ("own_batch", "neighbours")
    )
    verdict = "; ".join((wrong or ["identical"]) + said)
    return (
        f"| {case.name} | {kinds(single.posterior)} | {single.posterior.center.numel()} | {own} | "
        f"{rounding(found):.0e} | {neighbours} | {single.mutual_information:.4f} | {seconds:.0f} | {verdict} |",
        not wrong,
    )


def refusal(case: Case) -> tuple[str, bool]:
    """What a network without batch norm is told, and whether it is told at all."""
    model = case.build()
    assert not any(isinstance(module, _BatchNorm) for module in model.modules())
    batches = [images(case, BATCH_SIZE, seed, torch.float32) for seed in range(2)]
    try:
        bb.mcbn(model, batches, num_samples=2)
    except bb.BatchbayesError as error:
        return str(error), True
    return "no error", False


def main(names: list[str]) -> int:
    """Print the table, for the networks above or for the timm names on the command line; 1 if anything fails."""
    library = define_torchvision_operators()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", bb.BatchbayesWarning)  # random weights and three batches: the centre is far off
    packages = ("torch", "torchvision", "timm", "segmentation-models-pytorch", "numpy")
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in packages) + "\n")
    print(
        "| network | sites | D | own batch, float32 / 64 | rounding | neighbours, float32 / 64 | MI, nats | s | state |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    good = []
    for case in [timm_case(name) for name in names] or cases():
        text, well = line(case)
        print(text, flush=True)
        good.append(well)
    message, well = refusal(timm_case("convnext_atto"))
    print(f"\ntimm convnext_atto, which has no batch norm: {message}")
    print(f"\n{sum(good)} of {len(good)} networks well")
    del library
    return 0 if all(good) and well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
