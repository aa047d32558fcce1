"""The readout by recursive least squares, against least squares over all steps so far."""

import copy

import pytest
import torch
from torch.nn import functional

from linrec import mixers
from linrec.learning import build_learner
from linrec.models import LanguageModel, ModelConfig
from linrec.trees import leaves

LA, RIDGE = 0.9, 0.3


def made(width=4, **options):
    torch.manual_seed(1)
    mixer = mixers.build("min_gru", width).double()
    return build_learner("frozen_rls", mixer, forgetting=LA, ridge=RIDGE, **options)


def drawn(rows=1, steps=30, width=4):
    torch.manual_seed(0)
    return torch.randn(2, rows, steps, width, dtype=torch.float64)


def ridge(x, y, weight):
    """Return the minimum of sum la^(t-s) weight |y - x w|^2 + ridge la^(t+1) |w|^2 of (b, t, ..)."""
    t = x.shape[1]
    of_step = weight * LA ** torch.arange(t - 1, -1, -1).double()
    A = torch.einsum("bt,btm,btk->mk", of_step, x, x) + RIDGE * LA**t * torch.eye(x.shape[2]).double()
    return torch.linalg.solve(A, torch.einsum("bt,btm,btn->mn", of_step, x, y))


@pytest.mark.parametrize("rows", [1, 3])
def test_after_every_step_the_readout_is_the_weighted_ridge_solution(rows):
    learner, (x, y) = made(), drawn(rows)
    weight = torch.rand(rows, 30, dtype=torch.float64)
    weight[:, 7] = 0
    reset = torch.zeros(rows, 30, dtype=torch.bool)
    reset[-1, 11] = True
    with torch.no_grad():
        features = learner.model(x, reset=reset)[0]
    features = torch.cat([features, torch.ones(rows, 30, 1)], 2)
    for t in range(30):
        expected = ridge(features[:, :t], y[:, :t], weight[:, :t]) if t else torch.zeros(5, 4)
        step = learner.step(x[:, t], y[:, t], reset[:, t], weight[:, t])
        # the prediction is of the readout before the step
        assert torch.allclose(step.prediction, features[:, t] @ expected.double(), rtol=0, atol=1e-10)
        w = ridge(features[:, : t + 1], y[:, : t + 1], weight[:, : t + 1])
        assert (learner.memory["readout"]["w"] - w).abs().max() < 1e-10


def test_a_chunk_is_its_steps_and_the_model_is_frozen():
    steps, chunks, (x, y) = made(), made(), drawn(2)
    before = copy.deepcopy(steps.model.state_dict())
    for t in range(30):
        steps.step(x[:, t], y[:, t])
    for part in range(0, 30, 10):
        chunks.chunk(x[:, part : part + 10], y[:, part : part + 10])
    for a, b in zip(leaves(steps.memory), leaves(chunks.memory), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(before[name], p) for name, p in steps.model.state_dict().items())


def test_all_outputs_share_p():
    one, both, (x, y) = made(), made(), drawn()
    one.chunk(x, y.flip(2))
    both.chunk(x, y)
    assert torch.equal(one.memory["readout"]["P"], both.memory["readout"]["P"])
    assert torch.allclose(one.memory["readout"]["w"].flip(1), both.memory["readout"]["w"], rtol=1e-12)


def test_a_reset_row_keeps_the_readout():
    learner, (x, y) = made(), drawn(2)
    learner.chunk(x, y)
    before = copy.deepcopy(learner.memory)
    learner.reset(torch.tensor([True, False]))
    assert torch.equal(learner.memory["readout"]["w"], before["readout"]["w"])
    assert not leaves(learner.memory["state"])[0][0].any()
    assert torch.equal(leaves(learner.memory["state"])[0][1], leaves(before["state"])[0][1])
    learner.reset()
    assert learner.memory is None


def test_p_starts_again_before_it_overflows():
    learner, (x, y) = made(), drawn(steps=400)
    # all features are alike: the other directions grow by 1 / la, to 1e18 after 400 steps
    with torch.no_grad():
        for p in learner.model.parameters():
            p.zero_()
    y = torch.ones_like(y)
    loss = learner.chunk(x, y).loss
    P = learner.memory["readout"]["P"]
    assert P.diagonal().sum() < 1e13 and torch.equal(P, P.T)
    # and the readout stays
    assert loss[0, -200:].max() < 1e-9


def test_classes_are_predicted_by_probabilities():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=4, d_model=8, n_layers=1, mixer="lru"))
    learner = build_learner("frozen_rls", model, floor=0.01)
    tokens = torch.arange(400)[None] % 4
    targets = (tokens + 1) % 4
    targets[0, 100] = -100
    step = learner.chunk(tokens, targets)
    assert torch.allclose(step.prediction.exp().sum(2), torch.ones(1, 400), atol=1e-5)
    assert step.prediction.exp().min() >= 0.01 / 4 / 2
    # the uniform guess at first, and then the next token, but for the floor of three others
    assert step.loss[0, 0] == pytest.approx(1.3863, abs=1e-4)
    assert step.loss[0, -1] < 0.03 and step.loss[0, 100] == 0


@pytest.mark.parametrize("options", [{"forgetting": 1.5}, {"ridge": 0.0}, {"floor": 1.0}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        build_learner("frozen_rls", mixers.build("lru", 4), **options)


def test_a_deep_reservoir_reads_all_layers():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=5, d_model=6, n_layers=3, mixer="elman", mixer_args={"init": "reservoir"})
    model = LanguageModel(config).double()
    outputs = []
    hooks = [
        block.mixer.register_forward_hook(lambda mixer, given, made: outputs.append(made[0]))
        for block in model.blocks
    ]
    x, y = torch.randint(5, (2, 1, 20))
    model(x)
    for hook in hooks:
        hook.remove()
    learner = build_learner("frozen_rls", model, forgetting=LA, ridge=RIDGE, layers=True)
    learner.chunk(x, y)
    features = torch.cat([*outputs, torch.ones(1, 20, 1)], 2).detach()
    expected = ridge(features, functional.one_hot(y, 5).double(), torch.ones(1, 20, dtype=torch.float64))
    assert (learner.memory["readout"]["w"] - expected).abs().max() < 1e-10
