"""Students against teachers with a known mean and spread."""

import pytest
import torch
from torch import nn

import batchbayes as bb
from batchbayes.distill import dirichlet_loss, mixture_loss, soft_cross_entropy
from batchbayes.training.loop import TrainingConfig

X = torch.linspace(-2, 2, 64)[:, None]


def teacher(outputs, count=6):
    """An ensemble of linear functions."""
    torch.manual_seed(0)
    return bb.ensemble([nn.Linear(1, outputs) for _ in range(count)])


def student(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, outputs))


CONFIG = TrainingConfig(epochs=150, batch_size=64, learning_rate=0.02)


def test_a_student_of_the_mean_predicts_the_mean():
    posterior, pupil = teacher(3), student(3)
    losses = bb.distill.train_student(posterior, pupil, X, bb.categorical(), CONFIG)
    expected, found = (bb.predict(p, X, bb.categorical()) for p in (posterior, bb.deterministic(pupil)))
    assert (found.probs - expected.probs).abs().max() < 0.03
    assert losses[-1] == pytest.approx(float(expected.entropy.mean()), abs=0.01)  # the least cross-entropy there is


def test_a_student_learns_under_the_temperature_of_the_likelihood():
    posterior, pupil, cold = teacher(3), student(3), bb.categorical(temperature=0.3)
    bb.distill.train_student(posterior, pupil, X, cold, CONFIG)
    expected, found = (bb.predict(p, X, cold).probs for p in (posterior, bb.deterministic(pupil)))
    assert (found - expected).abs().max() < 0.03  # 0.3 if the temperature were applied twice


def test_a_student_of_maps_has_its_classes_where_the_teacher_has_them():
    torch.manual_seed(0)
    images = torch.randn(16, 1, 3, 3)  # as many columns as classes, so that another axis would fit too
    posterior, pupil = bb.ensemble([nn.Conv2d(1, 3, 1) for _ in range(3)]), nn.Conv2d(1, 3, 1)
    bb.distill.train_student(posterior, pupil, images, bb.categorical(), TrainingConfig(150, 16, 0.05))
    expected, found = (bb.predict(p, images, bb.categorical()).probs for p in (posterior, bb.deterministic(pupil)))
    assert (found - expected).abs().mean() < 0.02


def test_a_student_of_the_mean_of_real_targets_predicts_it():
    posterior, pupil = teacher(2), student(2)
    bb.distill.train_student(posterior, pupil, X, bb.gaussian(precision=10.0), CONFIG)
    expected, found = (bb.predict(p, X, bb.gaussian(10.0)).mean for p in (posterior, bb.deterministic(pupil)))
    assert (found - expected).abs().max() < 0.05


def test_a_dirichlet_student_predicts_mean_and_disagreement():
    posterior, pupil = teacher(3), student(3)
    bb.distill.train_student(posterior, pupil, X, bb.categorical(), CONFIG, head="dirichlet")
    expected, found = bb.predict(posterior, X, bb.categorical()), bb.distill.dirichlet_predictive(pupil, X)
    assert (found.probs - expected.probs).abs().mean() < 0.05
    assert torch.corrcoef(torch.stack([found.mutual_information, expected.mutual_information]))[0, 1] > 0.9
    assert float(found.mutual_information.mean()) == pytest.approx(float(expected.mutual_information.mean()), rel=0.4)


def test_a_gaussian_student_predicts_mean_and_total_variance():
    posterior, pupil = teacher(1), student(2)
    bb.distill.train_student(posterior, pupil, X, bb.gaussian(precision=10.0), CONFIG, head="gaussian")
    expected = bb.predict(posterior, X, bb.gaussian(precision=10.0))
    found = bb.predict(bb.deterministic(pupil), X, bb.heteroscedastic_gaussian())
    assert (found.mean - expected.mean).abs().max() < 0.15
    assert ((found.variance / expected.variance).log().abs() < 0.3).all()


def test_losses_are_those_of_torch_distributions():
    probs, log_alpha = torch.rand(5, 7, 3).softmax(-1), torch.randn(5, 3)
    each = torch.distributions.Dirichlet(log_alpha.exp()[:, None]).log_prob(probs)
    torch.testing.assert_close(dirichlet_loss(log_alpha, probs), -each.mean(), rtol=1e-3, atol=1e-3)
    logits = torch.randn(5, 3)
    by_draw = torch.stack([soft_cross_entropy(logits, probs[:, s]) for s in range(7)]).mean()
    torch.testing.assert_close(soft_cross_entropy(logits, probs.mean(1)), by_draw)
    outputs, draws = torch.randn(4, 2).double(), torch.randn(4, 6, 1).double()
    y = draws + 0.5 * torch.randn(4, 6, 20_000).double()
    density = torch.distributions.Normal(outputs[:, :1, None], (0.5 * outputs[:, 1:, None]).exp()).log_prob(y)
    torch.testing.assert_close(mixture_loss(outputs, draws, torch.tensor(0.25)), -density.mean(), rtol=0.02, atol=0.02)


def test_closed_forms_of_the_dirichlet_are_means_over_draws():
    log_alpha = torch.tensor([[0.3, -1.0, 1.2], [2.0, 2.0, 0.0]])
    pupil = nn.Linear(3, 3, bias=False)
    nn.init.eye_(pupil.weight)
    found = bb.distill.dirichlet_predictive(pupil, log_alpha)
    torch.manual_seed(0)
    pi = torch.distributions.Dirichlet(log_alpha.exp()).sample((200_000,))
    torch.testing.assert_close(found.probs, pi.mean(0), rtol=0.01, atol=2e-3)
    entropy = torch.distributions.Categorical(pi).entropy().mean(0)
    torch.testing.assert_close(found.expected_entropy, entropy, rtol=0.01, atol=2e-3)
    torch.testing.assert_close(found.epistemic_variance, pi.var(0), rtol=0.02, atol=1e-3)


def test_views_are_seen_by_teacher_and_student():
    images, posterior = (
        torch.randn(8, 1, 4, 4),
        bb.ensemble([nn.Sequential(nn.Flatten(), nn.Linear(16, 2)) for _ in range(2)]),
    )
    sizes = []
    pupil = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    pupil.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    config = TrainingConfig(epochs=1, batch_size=8)
    bb.distill.train_student(posterior, pupil, images, bb.categorical(), config, transform=bb.RandomFlip(), num_views=3)
    assert sum(sizes) == 8 * 4


BAD = {
    "head": ({"head": "median"}, 'head="mean"'),
    "likelihood": ({"head": "gaussian"}, "head='gaussian' with"),
    "no transform": ({"num_views": 2}, "transform= beside num_views="),
    "samples": ({"num_samples": 0}, "num_samples as a whole number"),
}


def test_a_student_with_other_outputs_is_refused():
    with pytest.raises(bb.BatchbayesError, match=r"outputs \(N, K\)"):
        bb.distill.dirichlet_predictive(nn.Conv2d(1, 3, 1), torch.randn(2, 1, 4, 4))
    with pytest.raises(bb.BatchbayesError, match=r"outputs of shape \(64, 3\)"):
        bb.distill.train_student(teacher(3), student(1), X, bb.categorical(), CONFIG)
    network = student(3)
    for posterior in (bb.deterministic(network), bb.ensemble([student(3), network])):
        with pytest.raises(bb.BatchbayesError, match="weights of the teacher, which training would change"):
            bb.distill.train_student(posterior, network, X, bb.categorical(), CONFIG)


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_options_are_refused(options, words):
    with pytest.raises(bb.BatchbayesError, match=words):
        bb.distill.train_student(teacher(3), student(3), X, bb.categorical(), CONFIG, **options)
