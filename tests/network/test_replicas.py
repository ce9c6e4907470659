"""Replicas: what is shared, what is not, what follows later changes, and what cannot be copied."""

import gc
import signal
import threading
import tracemalloc
import weakref
from random import Random
from types import SimpleNamespace

import pytest
import torch
from batchbayes_papers.models.cifar_resnet import CifarResNet
from helpers.references import left_alone
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import batchbayes as bb
from batchbayes.network.function import Network, as_network
from batchbayes.network.replicas import Lent


def small(**options: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.ReLU(), nn.Linear(4, 2))


class Wrapped(nn.Module):
    """A batch norm that is reached in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.reach(x))

    def reach(self, x: Tensor) -> Tensor:
        return self.norm(x)


class ByBoundMethod(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.reach = super().reach


class ByList(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.order = [self.norm]

    def reach(self, x: Tensor) -> Tensor:
        return self.order[0](x)


class ByClosure(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.reach = lambda x: self.norm(x)


def by_global_name(what: str) -> nn.Module:
    """As in a notebook: a function in the place of a method names a global, the layer itself or its old method."""
    network = Wrapped()
    names = {"norm": network.norm, "usual": network.norm.forward}
    if what == "norm":
        network.reach = eval("lambda x: norm(x)", names)
    else:
        network.norm.forward = eval("lambda x: usual(x)", names)
    return network


class ByWeakReference(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.reference = weakref.ref(self.norm)

    def reach(self, x: Tensor) -> Tensor:
        return self.reference()(x)


class WithLock(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def reach(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().reach(x)


class Counting(Wrapped):
    """Changes buffers and attributes in evaluation mode, and switches a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("latest", torch.zeros(3))
        self.drop, self.seen = nn.Dropout(0.5), {}

    def reach(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = x.mean(0)
        self.seen[len(self.seen)] = x
        self.number = 1
        self.drop.train()
        return super().reach(x)


KINDS = {
    "plain": small,
    "bound method": ByBoundMethod,
    "list of modules": ByList,
    "lock": WithLock,
    "counting": Counting,
    "parametrised": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4)),
    "traced by fx": lambda: torch.fx.symbolic_trace(small()),
    "compiled part": lambda: nn.Sequential(torch.compile(small(), backend="eager"), nn.ReLU()),
    "tied modules": lambda: (lambda layer: nn.Sequential(layer, nn.BatchNorm1d(3), layer))(nn.Linear(3, 3)),
    "recurrent": lambda: Recurrent(),
}
REFUSED = {
    "closure": ByClosure,
    "global layer": lambda: by_global_name("norm"),
    "global method": lambda: by_global_name("usual"),
    "weak reference": ByWeakReference,
    "no copying": lambda: NoCopying(),
    "scripted": lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.BatchNorm1d(3)),
}


class NoCopying(Wrapped):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("it is unique")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.norm = nn.LSTM(1, 4, batch_first=True), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.cells(x[..., None])[0][:, -1])


def trained(build) -> nn.Module:
    network = build()
    with torch.no_grad():
        for _ in range(20):
            network.train()(torch.randn(16, 3) + 0.5)
    return network


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_gives_the_network_s_answer_and_leaves_it_alone(kind, training):
    network, x = trained(KINDS[kind]).train(training), torch.randn(5, 3)
    with left_alone(network), torch.no_grad():
        found = as_network(network)(x)
        again = as_network(network)(x)
    with torch.no_grad():
        assert torch.equal(found, network.eval()(x))
    assert torch.equal(found, again)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("closure", r"got ByClosure.reach, which refers to a .*make reach a method"),
        ("global layer", r"got Wrapped.reach, which refers to a BatchNorm1d"),
        ("global method", r"got BatchNorm1d.forward, which refers to a"),
        ("weak reference", r"got ByWeakReference.reference, which refers to a BatchNorm1d"),
        ("scripted", r"got a scripted module '0'. Do this: pass the network in Python"),
        ("no copying", r"got a NoCopying that does not: TypeError: it is unique"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_network_that_cannot_be_copied_is_told_which_attribute_to_change(kind, message):
    network = trained(REFUSED[kind])
    with left_alone(network), pytest.raises(bb.BatchbayesError, match=message):
        bb.deterministic(network)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_reaches_the_layer_however_it_is_called(kind):
    network, x = trained(KINDS[kind]), torch.randn(64, 3)
    posterior = bb.mcbn(network, [x + 0.1 * torch.randn(64, 3) for _ in range(4)])
    with torch.no_grad():
        assert not torch.equal(posterior.draw(0, 0)(x), posterior.draw(0, 1)(x))


def test_a_replica_follows_the_weights():
    network, x = trained(small), torch.randn(5, 3)
    function = bb.deterministic(network).draw(0, 0)
    network.eval()
    with torch.no_grad():
        function(x)
        network[0].weight.mul_(2)  # as an optimiser does
        assert torch.equal(function(x), network(x))
        network.load_state_dict({k: v + 0.5 for k, v in network.state_dict().items()}, assign=True)
        assert torch.equal(function(x), network(x))
        network[1].running_mean = torch.ones(4)  # another tensor
        assert torch.equal(function(x), network(x))
        network[1].register_forward_hook(lambda *_: torch.zeros(5, 4))  # a hook of the user's
        assert torch.equal(function(x), network(x))
        network[3] = nn.Linear(4, 2)  # another module
        assert torch.equal(function(x), network(x))
        network[1]._forward_hooks.clear()
        network[1].eps = 0.5  # an attribute
        assert torch.equal(function(x), network(x))


def test_a_posterior_follows_a_network_that_is_moved():
    """To another device, or as here to another precision: buffers become other tensors, parameters keep theirs."""
    network, x = trained(small), torch.randn(40, 3)
    posterior = bb.mcbn(network, x, batch_size=8)
    before = bb.predict(posterior, x[:5], bb.categorical()).probs
    network.double()
    after = bb.predict(posterior, x[:5].double(), bb.categorical()).probs
    assert after.dtype == torch.float64
    torch.testing.assert_close(after.float(), before)


def test_an_interrupt_at_any_point_harms_nothing():
    """An exception in any layer, as Ctrl-C raises it, leaves the network alone and the next pass right."""
    network, x = trained(small), torch.randn(6, 3)
    wrapped = Network(network)
    with torch.no_grad():
        expected = wrapped(x)
        for name in ("0", "1", "2", "3"):

            def interrupt(_: Tensor) -> None:
                raise KeyboardInterrupt

            with left_alone(network), pytest.raises(KeyboardInterrupt):
                wrapped(x, tensors={"1.running_mean": torch.ones(4)}, before={name: interrupt}, dropout=True)
            assert torch.equal(wrapped(x), expected)


def test_a_replica_costs_no_copy_of_the_weights():
    network = CifarResNet(20).eval()
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    x, done = torch.zeros(1, 3, 32, 32), []
    storages = {p.untyped_storage().data_ptr() for p in network.parameters()}
    with Lent(network, {}) as place:
        assert {p.untyped_storage().data_ptr() for p in place.module.parameters()} == storages
        assert place.module is not network

    def work() -> None:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        with torch.no_grad():
            Network(network)(x)
        gc.collect()
        done.append((tracemalloc.get_traced_memory()[0] - before) / weights)
        tracemalloc.stop()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done[0] < 0.05


def test_a_replica_does_not_keep_the_network_alive():
    network = trained(small)
    bb.predict(bb.deterministic(network), torch.randn(5, 3), bb.categorical())
    gone = weakref.ref(network)
    del network
    gc.collect()
    assert gone() is None


def test_tensors_stand_in_for_weights():
    network, x = trained(small), torch.randn(5, 3)
    other = torch.randn(2, 4, requires_grad=True)
    outputs = Network(network)(x, tensors={"3.weight": other})
    network.eval()
    hidden = network[:3](x)
    torch.testing.assert_close(outputs, hidden @ other.T + network[3].bias)
    outputs.sum().backward()
    assert other.grad is not None  # gradients pass to them


def test_weights_of_recurrent_layers_can_be_replaced():
    network, x = trained(Recurrent), torch.randn(5, 3)
    zero = {f"cells.{name}": torch.zeros_like(p) for name, p in network.cells.named_parameters()}
    with torch.no_grad():
        found = Network(network)(x, tensors=zero)
        assert torch.equal(found, network.eval().norm(torch.zeros(5, 4)))


def test_lazy_modules_are_refused():
    with pytest.raises(bb.BatchbayesError, match=r"LazyLinear.*forward pass"):
        bb.deterministic(nn.Sequential(nn.LazyLinear(3)))


class Late(Wrapped):
    """Changes a buffer only if there are many rows, and reads an object in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.config = SimpleNamespace(scale=1.0)

    def reach(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            self.calls += 1
        return super().reach(x) * self.config.scale


def test_buffers_that_change_in_a_later_pass_are_guarded():
    network = trained(Late)
    with left_alone(network), torch.no_grad():
        for rows in (2, 8, 8):
            Network(network)(torch.randn(rows, 3))


def test_a_first_pass_that_fails_does_not_end_the_guard():
    network = trained(Counting)
    with left_alone(network), torch.no_grad():
        with pytest.raises((RuntimeError, bb.BatchbayesError)):
            Network(network)(torch.randn(5, 7))
        for _ in range(2):
            Network(network)(torch.randn(5, 3))


def test_objects_in_attributes_are_followed():
    network, x = trained(Late).eval(), torch.randn(4, 3)
    with torch.no_grad():
        Network(network)(x)
        network.config.scale = 2.0
        assert torch.equal(Network(network)(x), network(x))
        network.config = SimpleNamespace(scale=3.0)
        assert torch.equal(Network(network)(x), network(x))


def compiled_in_place() -> nn.Module:
    network = trained(small)
    network.compile(backend="eager")
    return network


def test_a_network_that_compiles_itself_is_not_run_in_its_place():
    """module.compile() keeps a function that runs the user's module, and copies must not take it over."""
    network, x = compiled_in_place(), torch.randn(64, 3)
    with left_alone(network):
        posterior = bb.mcbn(network, x, batch_size=16)
        probs = bb.predict(posterior, x, bb.categorical(), num_samples=4).probs
    twin = trained(small)
    twin.load_state_dict(network.state_dict())
    assert torch.equal(probs, bb.predict(bb.mcbn(twin, x, batch_size=16), x, bb.categorical(), num_samples=4).probs)


class Remembering(Wrapped):
    """Has a method of its own as a hook, and so a registry of hooks that must be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.norm.register_forward_hook(self.remember)

    def remember(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.seen = output


def test_hooks_that_come_and_go_beside_a_bound_method_are_followed():
    network, x = trained(Remembering).eval(), torch.randn(5, 3)
    wrapped, network.seen = Network(network), None
    with torch.no_grad():
        plain = wrapped(x)
        assert network.seen is None
        hook = network.norm.register_forward_hook(lambda module, args, output: 2 * output)
        assert torch.equal(wrapped(x), network(x))
        assert not torch.equal(wrapped(x), plain)
        hook.remove()
        assert torch.equal(wrapped(x), plain)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.relu(self.encoder(x)))


@pytest.mark.parametrize("name", ["encoder.weight", "decoder.weight"])
def test_a_tensor_stands_in_for_a_parameter_in_all_its_places(name):
    network, x, other = Tied(), torch.randn(5, 3), torch.randn(3, 3)
    with torch.no_grad():
        torch.testing.assert_close(Network(network)(x, tensors={name: other}), torch.relu(x @ other.T) @ other.T)
        network.decoder.weight = nn.Parameter(torch.eye(3))  # from now on they are two
        expected = torch.relu(x @ other.T) if name == "encoder.weight" else None
        found = Network(network)(x, tensors={name: other})
        assert expected is None or torch.equal(found, expected)
        both = {"encoder.weight": other, "decoder.weight": torch.zeros(3, 3)}
        assert torch.equal(Network(Tied())(x, tensors=both), torch.zeros(5, 3))


def test_tensors_follow_a_network_that_is_moved():
    """Weights that a posterior keeps for itself take the dtype that the network has now."""
    networks = [trained(small) for _ in range(3)]
    x, posterior = torch.randn(5, 3), bb.weight_samples(networks[0], [n.state_dict() for n in networks])
    before = bb.predict(posterior, x, bb.categorical(), num_samples=3).probs
    networks[0].double()
    after = bb.predict(posterior, x.double(), bb.categorical(), num_samples=3).probs
    assert after.dtype == torch.float64
    torch.testing.assert_close(after.float(), before)


def test_a_pass_inside_a_pass_disturbs_neither():
    network, x = trained(small), torch.randn(5, 3)
    wrapped, moved = Network(network), {"tensors": {"1.running_mean": torch.ones(4)}}
    inner: list[Tensor] = []
    with torch.no_grad(), left_alone(network):
        plain, expected = wrapped(x), wrapped(x, **moved)
        assert torch.equal(wrapped(x, before={"0": lambda h: inner.append(wrapped(x))}, **moved), expected)
        assert torch.equal(inner[0], plain)
        assert torch.equal(wrapped(x), plain)


def test_weights_that_torch_keeps_for_all_draws_are_refused():
    network, x = trained(KINDS["parametrised"]), torch.randn(5, 3)
    name = "0.parametrizations.weight.original1"
    with torch.no_grad(), parametrize.cached():
        assert torch.equal(Network(network)(x), network.eval()(x))
        with pytest.raises(bb.BatchbayesError, match=r"parametrize.cached.*end that block"):
            Network(network)(x, tensors={name: torch.randn(4, 3)})


class Bank(nn.Module):
    """Writes to a large buffer, but only if there are many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.register_buffer("bank", torch.zeros(5000))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            self.bank[: len(x)] += 1
        return self.last(x)


def test_a_large_buffer_that_changes_late_stays():
    wrapped = Network(Bank())
    with left_alone(wrapped.module):
        for rows in (2, 8, 8):
            wrapped(torch.randn(rows, 3))


@pytest.mark.parametrize("kind", ["plain", "counting"])
def test_real_interrupts_at_random_moments_harm_nothing(kind):
    network, x = trained(KINDS[kind]), torch.randn(6, 3)
    wrapped, random, interrupted = as_network(network), Random(0), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        with torch.no_grad(), left_alone(network):
            expected = wrapped(x)
            for _ in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-4))
                    while True:
                        wrapped(x, dropout=True)
                except KeyboardInterrupt:
                    interrupted += 1
                assert torch.equal(wrapped(x), expected)
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert interrupted == 150


def test_tensors_may_be_named_as_torch_compile_names_them():
    network, x, other = trained(KINDS["compiled part"]), torch.randn(5, 3), torch.randn(2, 4)
    with torch.no_grad():
        plain = Network(network)(x, tensors={"0.3.weight": other})
        assert torch.equal(Network(network)(x, tensors={"0._orig_mod.3.weight": other}), plain)


@pytest.mark.parametrize("name", ["9.weight", "0.scale"])
def test_a_tensor_that_the_network_no_longer_has_is_an_error(name):
    with pytest.raises(bb.BatchbayesError, match=r"a network with the .*fit again after you change the network"):
        Network(small())(torch.randn(5, 3), tensors={name: torch.ones(1)})
