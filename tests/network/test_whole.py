"""Batches that are no rows of examples: graphs, packed and ragged sequences pass whole, and their answers come back."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import batchbayes as bb
from batchbayes.network.inputs import Whole

STREAM = torch.Generator().manual_seed(0)


@dataclass
class Graph:
    """As those of PyTorch Geometric: nodes, edges, the graph of each node, and a label for each graph."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor

    @property
    def num_graphs(self):
        return len(self.y)

    def to(self, device):
        return replace(self, x=self.x.to(device), edge_index=self.edge_index.to(device), batch=self.batch.to(device))


def graphs(sizes):
    nodes = sum(sizes)
    of_node = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    edges = torch.randint(0, nodes, (2, 4 * nodes), generator=STREAM)
    edges = edges[:, of_node[edges[0]] == of_node[edges[1]]]
    x = torch.randn(nodes, 3, dtype=torch.float64, generator=STREAM)
    return Graph(x, edges, of_node, torch.randint(0, 2, (len(sizes),), generator=STREAM))


class GraphNetwork(nn.Module):
    """Sums neighbours twice, with batch norm over nodes and dropout; answers for each node, or for each graph."""

    def __init__(self, pooled=False):
        super().__init__()
        self.pooled = pooled
        self.first, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=1.0)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 2)
        self.double()(graphs([300, 300]))
        self.norm.momentum = 0.1
        self.eval()

    def forward(self, graph, edge_index=None):
        x, edges = (graph.x, graph.edge_index) if edge_index is None else (graph, edge_index)
        hidden = self.drop(self.norm(self.first(x)).relu())
        hidden = hidden + torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        if self.pooled:
            hidden = hidden.new_zeros(graph.num_graphs, 8).index_add(0, graph.batch, hidden)
        return self.last(hidden)


TRAINING = [graphs([30, 40, 25, 36]) for _ in range(12)]
METHODS = {
    "mcbn": lambda network: bb.mcbn(network, TRAINING, num_samples=8),
    "stochastic_bn": lambda network: bb.stochastic_bn(network, TRAINING, num_samples=8),
    "mc_dropout": lambda network: bb.mc_dropout(network),
    "deterministic": lambda network: bb.deterministic(network),
    "ensemble": lambda network: bb.ensemble([network, GraphNetwork(network.pooled)]),
}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_graphs_pass_whole_and_their_answers_come_back(method, pooled):
    posterior = METHODS[method](GraphNetwork(pooled))
    test = [graphs([5, 7]), graphs([9]), graphs([4, 6, 8])]
    found = list(bb.predict_stream(posterior, test, [bb.categorical()], num_samples=4, seed=1))
    for graph, (batch, (predictive,)) in zip(test, found, strict=True):
        assert batch is graph
        assert len(predictive.probs) == (graph.num_graphs if pooled else len(graph.x))
        draws = [posterior.draw(1, s)(Whole(graph)).softmax(-1) for s in range(predictive.num_samples)]  # a naive loop
        torch.testing.assert_close(predictive.probs, torch.stack(draws).mean(0))
    joined = bb.predict(posterior, test, bb.categorical(), num_samples=4, seed=1, chunk_size=1, engine="auto")
    assert torch.equal(joined.probs, torch.cat([own.probs for _, (own,) in found]))
    alone = bb.predict(posterior, test[0], bb.categorical(), num_samples=4, seed=1)
    assert torch.equal(alone.probs, found[0].predictives[0].probs)


def test_statistics_are_those_of_each_batch():
    network = GraphNetwork()
    posterior = bb.mcbn(network, TRAINING, num_samples=12, center="batches")
    assert posterior.batch_size == 4
    for row, graph in enumerate(TRAINING):
        hidden = network.first(graph.x)
        omega = torch.cat([hidden.mean(0), 0.5 * (hidden.var(0, correction=0) + network.norm.eps).log()]).detach()
        torch.testing.assert_close(posterior.center + posterior.deviations[row], omega)


def test_arguments_by_position():
    network = GraphNetwork()
    by_hand = bb.mcbn(network, TRAINING, batch_size=4, inputs=lambda graph: Whole(graph.x, graph.edge_index))
    as_object = bb.mcbn(network, TRAINING)
    test = graphs([5, 7])
    found = bb.predict(by_hand, [test], bb.categorical())
    assert torch.equal(found.probs, bb.predict(as_object, test, bb.categorical()).probs)


def test_saved_and_loaded(tmp_path):
    network, test = GraphNetwork(), graphs([5, 7])
    posterior = bb.mcbn(network, TRAINING, inputs=bb.Whole)
    bb.save(posterior, tmp_path / "p")
    found = bb.load(tmp_path / "p", network, import_functions=True)
    assert found.network.inputs is bb.Whole
    assert torch.equal(*(bb.predict(p, test, bb.categorical()).probs for p in (posterior, found)))


class SequenceNetwork(nn.Module):
    """An answer for each sequence: packed, or a list of tensors of any length."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.GRU(3, 6), nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 1)
        self.double()(sequences(500))
        self.norm.momentum = 0.1
        self.eval()

    def forward(self, given):
        packed = given if isinstance(given, PackedSequence) else pack_sequence(given, enforce_sorted=False)
        return self.head(self.norm(self.body(packed)[1][0]))[:, 0]


def sequences(count):
    lengths = torch.randint(1, 9, (count,), generator=STREAM).tolist()
    return [torch.randn(length, 3, dtype=torch.float64, generator=STREAM) for length in lengths]


@pytest.mark.parametrize("form", ["packed", "ragged"])
def test_sequences_of_any_length(form):
    network = SequenceNetwork()
    ragged = [sequences(16) for _ in range(6)]
    if form == "packed":
        batches, inputs = [pack_sequence(each, enforce_sorted=False) for each in ragged], None
    else:
        batches, inputs = [(each, torch.zeros(16)) for each in ragged], lambda batch: Whole(batch[0])
    posterior = bb.mcbn(network, batches, inputs=inputs)
    assert posterior.batch_size == 16
    assert len(posterior.deviations) == 6
    found = bb.predict(posterior, batches[:2], bb.gaussian(1.0), inputs=inputs, keep_draws=True)
    assert found.mean.shape == (32,)
    for row in (0, 5, 20):  # each sequence by itself
        alone = torch.stack([posterior.draw(0, s)(Whole([ragged[row // 16][row % 16]])) for s in range(6)])
        torch.testing.assert_close(found.draws[:, row], alone[:, 0])


def test_a_batch_is_not_changed_by_the_network():
    class Changing(GraphNetwork):
        def forward(self, graph):
            graph.x.add_(1.0)
            return super().forward(graph)

    posterior, test = bb.deterministic(Changing()), graphs([5, 7])
    before = test.x.clone()
    bb.predict(posterior, test, bb.categorical())
    assert torch.equal(test.x, before)


def test_refusals_say_what_to_do():
    network = GraphNetwork()
    nodes_and_edges = [Whole(graph.x, graph.edge_index) for graph in TRAINING]
    with pytest.raises(bb.BatchbayesError, match="does not tell how many examples it holds"):
        bb.mcbn(network, nodes_and_edges)
    with pytest.raises(bb.BatchbayesError, match="one batch that cannot be cut"):
        bb.mcbn(network, TRAINING[0], batch_size=4)
    posterior = bb.mcbn(network, nodes_and_edges, batch_size=4)
    with pytest.raises(bb.BatchbayesError, match="rows of examples for the linear engine"):
        bb.predict(posterior, nodes_and_edges, bb.categorical(), engine="linear")
    assert "have no linear engine" in bb.predict(posterior, nodes_and_edges, bb.categorical(), engine="auto").engine
    with pytest.raises(bb.BatchbayesError, match="rows of examples for include_query"):
        bb.mcbn(network, TRAINING, include_query=True)
    with pytest.raises(bb.BatchbayesError, match=r"bb\.Whole\(batch\[0\], batch\[1\]\)"):  # ragged, without a word
        bb.mcbn(SequenceNetwork(), [(sequences(4), torch.zeros(4))])
    with pytest.raises(bb.BatchbayesError, match=r"sequences of different lengths.*inputs=bb\.Whole"):
        bb.mcbn(SequenceNetwork(), [list(sequences(4)), list(sequences(4))])
    with pytest.raises(bb.BatchbayesError, match="one tensor of real inputs"):
        bb.drift(network, TRAINING)
    with pytest.raises(bb.BatchbayesError, match="pad them to rows of one size"):
        torch.cat([Whole(each) for each in TRAINING])


def test_a_draw_takes_a_batch_as_it_is():
    """Without `Whole` around it, as `predict` does."""
    posterior = bb.mcbn(GraphNetwork(), TRAINING, num_samples=3)
    assert torch.equal(posterior.draw(0, 1)(TRAINING[0]), posterior.draw(0, 1)(Whole(TRAINING[0])))
