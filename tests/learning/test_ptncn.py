"""P-TNCN against its equations written out, in float64."""

import pytest
import torch

from linrec import mixers
from linrec.learning import PTNCNNetwork, build_learner
from tests.learning.test_learners import assert_equal

SETTINGS = [
    ({}, {}),
    ({"skip": False}, {"alpha": 0.3, "gamma": 0.5}),
    ({}, {"feedback": "temporal", "beta": 0.4}),
]


def clipped(d):
    return d / max(1.0, float(d.norm()))


@pytest.mark.parametrize("network, options", SETTINGS)
@pytest.mark.parametrize("classes", [True, False])
def test_states_and_updates_are_the_equations(network, options, classes):
    torch.manual_seed(0)
    size = {"vocab_size": 5} if classes else {}
    net = PTNCNNetwork(None if classes else 3, 5, **size, hidden=4, std=0.7, **network).double()
    learner = build_learner("ptncn", net, **options)
    beta, alpha, gamma = (options.get(n, v) for n, v in (("beta", 0.1), ("alpha", 0.001), ("gamma", 1.0)))
    P = {name: p.detach() for name, p in net.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in P.items()}
    y1, y2, d1, d2 = torch.zeros(4, 2, 4, dtype=torch.float64)
    for t in range(6):
        inputs = torch.randint(5, (2,)) if classes else torch.randn(2, 3, dtype=torch.float64)
        targets = torch.randint(5, (2,)) if classes else torch.randn(2, 5, dtype=torch.float64)
        weight = torch.ones(2, dtype=torch.float64)
        if t == 3:
            weight[1] = 0
        m = weight[:, None]
        learner.step(inputs, targets, weight=weight)
        x = torch.eye(5, dtype=torch.float64)[inputs] if classes else inputs
        z2, z1 = y2 @ P["V2"], x @ P["M1"] + y1 @ P["V1"]
        if "U1" in P:
            z2, z1 = z2 + y1 @ P["M2"], z1 + y2 @ P["U1"]
        f1, f2 = torch.tanh(z1), torch.tanh(z2)
        guess = f1 @ P["W1"]
        ex = (guess.softmax(1) - torch.eye(5)[targets] if classes else guess - targets) * m
        e1 = (f2 @ P["W2"] - f1) * m
        new1 = torch.tanh(z1 - beta * (ex @ P["E1"] - alpha * e1))
        new2 = torch.tanh(z2 - beta * e1 @ P["E2"])
        last1, last2, d1, d2 = d1, d2, (f1 - new1) * m, (f2 - new2) * m
        change = {"W1": f1.T @ ex, "W2": f2.T @ d1, "M1": x.T @ d1, "V1": y1.T @ d1, "U1": y2.T @ d1}
        change |= {"M2": y1.T @ d2, "V2": y2.T @ d2}
        change = {name: clipped(d) for name, d in change.items()}
        if options.get("feedback") == "temporal":
            change["E1"] = clipped(-gamma * ex.T @ (d1 - last1))
            change["E2"] = clipped(-gamma * e1.T @ (d2 - last2))
        else:
            change |= {"E1": gamma * change["W1"].T, "E2": gamma * change["W2"].T}
        total = {name: of + change[name] for name, of in total.items()}
        y1, y2 = new1, new2
        assert_equal(learner.memory["state"], {"y1": y1, "y2": y2})
    assert_equal(learner.gradients(), total)


def test_errors_fall():
    torch.manual_seed(0)
    net = PTNCNNetwork(None, 6, vocab_size=6, hidden=16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.075, momentum=0.95, nesterov=True)
    learner = build_learner("ptncn", net, optimizer, update_every=1)
    # the symbol after 0 is that before it plus one: a pair of symbols tells the next, a single one does not
    cycle = torch.tensor([1, 0, 2, 3, 0, 4]).repeat(200)
    loss = learner.chunk(cycle[None, :-1], cycle[None, 1:]).loss[0]
    assert loss[-100:].mean() < 0.2 < 1.5 < loss[:20].mean()


def test_rows_reset_and_resume():
    def made():
        torch.manual_seed(0)
        net = PTNCNNetwork(None, 5, vocab_size=5, hidden=4).double()
        return build_learner("ptncn", net, torch.optim.SGD(net.parameters(), lr=0.1), update_every=2)

    x, y = torch.randint(5, (2, 2, 9))
    reset = torch.zeros(2, 9, dtype=torch.bool).index_fill(1, torch.tensor(5), True)
    whole, first, second = made(), made(), made()
    whole.chunk(x, y, reset)
    first.chunk(x[:, :4], y[:, :4])
    second.load_state_dict(first.state_dict())
    second.chunk(x[:, 4:], y[:, 4:], reset[:, 4:])
    assert torch.equal(whole.model.W1, second.model.W1)
    # after the reset, states are those of a new network at the same parameters
    fresh = build_learner("ptncn", whole.model)
    a = build_learner("ptncn", whole.model)
    a.chunk(x, y, reset)
    fresh.chunk(x[:, 5:], y[:, 5:])
    assert torch.equal(a.memory["state"]["y1"], fresh.memory["state"]["y1"])


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="PTNCNNetwork"):
        build_learner("ptncn", mixers.build("gru", 4))
