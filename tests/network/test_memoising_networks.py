"""Networks that note things down while they run in evaluation mode, as timm's LeViT and EfficientFormer do."""

import pytest
import torch
from torch import Tensor, nn

import batchbayes as bb


class MemoisingScale(nn.Module):
    """Derives a scale from its weight: each time in training, once in evaluation mode until `train()` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.memory: dict[str, Tensor] = {}
        self.shapes: list[torch.Size] = []

    def train(self, mode: bool = True) -> "MemoisingScale":
        super().train(mode)
        self.memory = {}
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        self.shapes.append(inputs.shape)
        self.latest = inputs
        if self.training:
            return inputs * self.weight.exp()
        if "scale" not in self.memory:
            self.memory["scale"] = self.weight.exp()
        return inputs * self.memory["scale"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), MemoisingScale(), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_fitting_and_predicting_leave_no_notes_behind() -> None:
    model, inputs = network(), torch.randn(40, 2)
    scale = model[1]
    assert isinstance(scale, MemoisingScale)
    memory, before = scale.memory, set(vars(scale))
    posterior = bb.mcbn(model, inputs, batch_size=8, num_samples=4)
    bb.predict(posterior, inputs, bb.categorical(), num_samples=4)
    assert scale.memory is memory
    assert memory == {}
    assert scale.shapes == []
    assert set(vars(scale)) == before


def test_notes_that_were_there_stay() -> None:
    model, inputs = network().eval(), torch.randn(40, 2)
    scale = model[1]
    assert isinstance(scale, MemoisingScale)
    model(inputs)
    noted, latest = scale.memory["scale"], scale.latest
    bb.mcbn(model, inputs, batch_size=8, num_samples=4)
    assert scale.memory["scale"] is noted
    assert scale.latest is latest
    assert scale.shapes == [(40, 3)]


def test_a_second_fit_sees_weights_that_training_has_moved() -> None:
    model, inputs = network(), torch.randn(40, 2)
    scale = model[1]
    assert isinstance(scale, MemoisingScale)
    bb.mcbn(model, inputs, batch_size=8, num_samples=4)
    with torch.no_grad():
        scale.weight.add_(1.0)
    moved = bb.mcbn(model, inputs, batch_size=8, num_samples=4)
    fresh_model = network()
    fresh_model.load_state_dict(model.state_dict())
    fresh = bb.mcbn(fresh_model, inputs, batch_size=8, num_samples=4)
    assert torch.equal(moved.center, fresh.center)
    assert torch.equal(moved.deviations, fresh.deviations)


def test_notes_of_the_user_s_that_training_has_dropped_are_not_used() -> None:
    """The shadow is made while the layer holds notes; then the weights move, and `train()` drops the notes."""
    model, inputs = network().eval(), torch.randn(40, 2)
    scale = model[1]
    assert isinstance(scale, MemoisingScale)
    function = bb.deterministic(model).draw(0, 0)
    with torch.no_grad():
        model(inputs)
        assert torch.equal(function(inputs), model(inputs))
        model.train()
        scale.weight.add_(1.0)
        model.eval()
        expected = function(inputs)
        assert torch.equal(expected, model(inputs))
        assert torch.equal(function(inputs), model(inputs))


class SameOutputTensor(nn.Module):
    """Writes all its outputs into one tensor, so that each call overwrites what the call before has returned."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.network, self.memory = network, torch.zeros(shape)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.memory.detach()[: len(inputs)].copy_(self.network(inputs))


@pytest.mark.filterwarnings("ignore:the network is not linear enough")
@pytest.mark.parametrize("engine", ["sample", "linear"])
@pytest.mark.parametrize("shape", [(3,), (30,), (4, 8, 8)], ids=["few classes", "many classes", "maps"])
@pytest.mark.parametrize("keep_draws", [False, True])
def test_a_network_may_use_its_output_tensor_again(monkeypatch, engine, shape, keep_draws) -> None:
    monkeypatch.setattr("batchbayes.engines.sample.CHUNK", 32)  # several passes for each chunk
    torch.manual_seed(0)
    count = torch.Size(shape).numel()
    plain = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, count), nn.Unflatten(1, shape)).eval()
    inputs, options = torch.randn(1000, 2), {"engine": engine, "chunk_size": 50, "keep_draws": keep_draws}
    found, expected = (
        bb.predict(bb.mcbn(network, inputs, batch_size=400), inputs[:120], bb.categorical(), **options)
        for network in (SameOutputTensor(plain, (5000, *shape)), plain)
    )
    assert torch.equal(found.probs, expected.probs)
    if keep_draws:
        assert torch.equal(found.draws, expected.draws)
