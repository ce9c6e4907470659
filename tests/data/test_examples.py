import torch

from batchbayes.data.examples import from_tensors


def test_the_two_parts_of_a_split_are_the_whole_and_know_their_rows():
    x = torch.arange(500.0)[:, None]
    part, rest = from_tensors("x", x, x[:, 0]).split(0.3, seed=1)
    assert sorted(part.rows().tolist() + rest.rows().tolist()) == list(range(500))
    for some in (part, rest):
        assert torch.equal(some.rows().float(), some.targets())
        assert torch.equal(some.rows(), some.rows())
    assert 110 < len(part.rows()) < 190  # 150, with a standard deviation of 10
    assert not torch.equal(part.rows(), from_tensors("x", x, x[:, 0]).split(0.3, seed=2)[0].rows())


def test_taking_keeps_the_order_asked_for():
    x = torch.arange(300.0)[:, None]
    assert from_tensors("x", x).take([250, 3, 130])[:, 0].tolist() == [250, 3, 130]
