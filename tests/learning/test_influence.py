"""Traces that approximate the influence of weights, against their definitions written out, in float64."""

import pytest
import torch

from linrec.learning import build_learner, stochastic
from linrec.trees import map_tree
from tests.learning.test_learners import assert_equal, learnt, mixer_of, stack_of, stream, tokens

STEPS = 12
WEIGHTS = ("rnn.weight_hh_l0", "rnn.weight_ih_l0", "rnn.bias_hh_l0")


def leaky_steps(leak=0.3):
    """Yield learner's arguments and, of each step of a leaky network, what the definitions need."""
    mixer, (x, y, _) = mixer_of("elman", leak=leak), stream(rows=1, steps=STEPS, resets=False)
    W, U, b, c = (p.detach() for p in mixer.rnn.parameters())
    h, steps = torch.zeros(4, dtype=torch.float64), []
    for t in range(STEPS):
        new = torch.tanh(W @ x[0, t] + b + U @ h + c)
        D = leak * (1 - new**2)
        inputs = torch.cat([h, x[0, t], torch.ones(1, dtype=torch.float64)])
        h = (1 - leak) * h + leak * new
        steps.append(
            (inputs, D, (1 - leak) * torch.eye(4, dtype=torch.float64) + D[:, None] * U, (h - y[0, t]) / 2)
        )
    return mixer, x, y, steps


def by_parameter(gradient):
    """Return a gradient (4, 9) of the weights of (h, x, 1) by the parameters' names."""
    return dict(zip(WEIGHTS, (gradient[:, :4], gradient[:, 4:8], gradient[:, 8]), strict=True))


def assert_steps(name, follow, **options):
    """Assert that a learner's gradient at every step is error * trace, with `follow(trace, *step)`."""
    mixer, x, y, steps = leaky_steps()
    learner = build_learner(name, mixer, **options)
    trace = total = torch.zeros(4, 9, dtype=torch.float64)
    for t, (inputs, D, J, error) in enumerate(steps):
        trace = follow(trace, torch.outer(D, inputs), J)
        total = total + error[:, None] * trace
        learner.step(x[:, t], y[:, t])
        assert_equal(learner.gradients(), by_parameter(total))
    return learner, trace


def test_d_rtrl_decays_by_the_leak():
    learner, trace = assert_steps("d_rtrl", lambda e, new, J: 0.7 * e + new)
    assert_equal({n: e[0, 0] for n, e in learner.memory["traces"][""].items()}, by_parameter(trace))


def test_rflo_is_d_rtrl_of_leaky_units():
    assert_steps("rflo", lambda e, new, J: 0.7 * e + new)


def test_ostl_decays_by_the_diagonal():
    assert_steps("ostl", lambda e, new, J: J.diagonal()[:, None] * e + new)


def test_ostl_without_h_leaves_the_recurrent_weights():
    assert_steps("ostl", lambda e, new, J: 0.7 * e + new, recurrent=False)


def test_e_prop_filters_its_traces():
    mixer, x, y, steps = leaky_steps()
    learner = build_learner("e_prop", mixer, kappa=0.6)
    trace = filtered = total = torch.zeros(4, 9, dtype=torch.float64)
    for t, (inputs, D, _, error) in enumerate(steps):
        trace = 0.7 * trace + torch.outer(D, inputs)
        filtered = 0.6 * filtered + trace
        total = total + error[:, None] * filtered
        learner.step(x[:, t], y[:, t])
    assert_equal(learner.gradients(), by_parameter(total))
    assert_equal(
        {n: e[0, 0] for n, e in learner.memory["traces"][""]["filtered"].items()}, by_parameter(filtered)
    )


def test_e_prop_takes_random_feedback_of_the_outputs_errors():
    mixer, x, y, steps = leaky_steps()
    learner, B = build_learner("e_prop", mixer, feedback="random"), torch.randn(4, 4, dtype=torch.float64)
    learner.memory = learner.first_memory(1, torch.device("cpu")) | {"feedback": {"": B}}
    trace = total = torch.zeros(4, 9, dtype=torch.float64)
    for t, (inputs, D, _, error) in enumerate(steps):
        trace = 0.7 * trace + torch.outer(D, inputs)
        total = total + (error @ B)[:, None] * trace
        learner.step(x[:, t], y[:, t])
    assert_equal(learner.gradients(), by_parameter(total))


def test_pp_prop_has_traces_of_inputs_and_of_units():
    mixer, x, y, steps = leaky_steps()
    learner = build_learner("pp_prop", mixer, alpha=0.8)
    ex, ef, total = torch.zeros(9), torch.zeros(4), torch.zeros(4, 9, dtype=torch.float64)
    for t, (inputs, D, _, error) in enumerate(steps):
        ex, ef = 0.8 * ex + inputs, 0.8 * 0.7 * ef + 0.2 * D
        total = total + torch.outer(error * ef, ex) / (1 - 0.8 ** (t + 1))
        learner.step(x[:, t], y[:, t])
    assert_equal(learner.gradients(), by_parameter(total))
    memory = learner.memory["traces"][""]
    assert torch.allclose(memory["x"][WEIGHTS[0]][0, :4], ex[:4]) and torch.allclose(
        memory["f"][WEIGHTS[0]][0, 0], ef
    )


def test_snap_masks_the_influence():
    mixer, (x, y, _) = mixer_of("elman"), stream(rows=1, steps=STEPS, resets=False)
    U = mixer.rnn.weight_hh_l0
    with torch.no_grad():
        # a ring: unit k reads itself and unit k - 1
        U.mul_(torch.eye(4) + torch.eye(4).roll(1, 0))
    reaches = U.detach().ne(0).double()
    for n in (1, 2, 3):
        # of weight (i, j) on unit k
        kept = torch.linalg.matrix_power(torch.eye(4, dtype=torch.float64) + reaches, n - 1).ne(0)
        mask = kept[:, :, None]
        learner, total = build_learner("snap", mixer, n=n), 0
        M, h = torch.zeros(4, 4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        W, _, b, c = (p.detach() for p in mixer.rnn.parameters())
        for t in range(STEPS):
            new = torch.tanh(W @ x[0, t] + b + U.detach() @ h + c)
            D = 1 - new**2
            J, direct = (
                D[:, None] * U.detach(),
                torch.einsum("k,ki,j->kij", D, torch.eye(4, dtype=torch.float64), h),
            )
            M = mask * (torch.einsum("kl,lij->kij", J, M) + direct)
            h = new
            total = total + torch.einsum("k,kij->ij", (h - y[0, t]) / 2, M)
            learner.step(x[:, t], y[:, t])
        assert_equal(learner.gradients(), {WEIGHTS[0]: total})
        assert_equal({0: learner.memory["traces"][""][WEIGHTS[0]][0]}, {0: M})


@pytest.mark.parametrize("name, n", [("elman", 2), ("gru", 2), ("min_gru", 1)])
def test_snap_is_exact_where_its_mask_is_full_or_the_recurrence_element_wise(name, n):
    mixer = mixer_of(name)
    whole = learnt(build_learner("bptt", mixer), *stream(), 32)
    assert_equal(learnt(build_learner("snap", mixer, n=n), *stream(), 8), whole)
    if n > 1:
        with pytest.raises(AssertionError):
            assert_equal(learnt(build_learner("snap", mixer, n=n - 1), *stream(), 8), whole, tolerance=1e-3)


@pytest.mark.parametrize("name", ["d_rtrl", "ostl"])
def test_units_without_others_are_exact(name):
    mixer = mixer_of("min_gru")
    whole = learnt(build_learner("bptt", mixer), *stream(), 32)
    assert_equal(learnt(build_learner(name, mixer), *stream(), 8), whole)


def test_units_of_an_lstm_have_two_numbers():
    mixer, (x, y, _) = mixer_of("lstm"), stream(rows=1, steps=STEPS, resets=False)
    learner = build_learner("d_rtrl", mixer)
    learnt(learner, x, y, torch.zeros(1, STEPS, dtype=torch.bool), 1)
    W, U, b, c = (p.detach() for p in mixer.rnn.parameters())
    h, s, e = torch.zeros(4, dtype=torch.float64), torch.zeros(4), torch.zeros(4, 4, dtype=torch.float64)
    for t in range(STEPS):
        i, f, g, o = (W @ x[0, t] + b + U @ h + c).chunk(4)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        # the trace of the cell's number by the input gate's weights
        e = f[:, None] * e + torch.outer(g * i * (1 - i), x[0, t])
        s = f * s + i * g
        h = o * torch.tanh(s)
    assert_equal({0: learner.memory["traces"][""]["rnn.weight_ih_l0"][0, 1, :4]}, {0: e})


def standard_errors(name, runs=4000, batches=40):
    """Return by how many standard errors the mean of many runs misses the exact gradient, in a direction."""
    mixer, (x, y, reset) = mixer_of("elman"), stream(rows=1, steps=8, resets=False)
    exact = learnt(build_learner("bptt", mixer), x, y, reset, 8)
    torch.manual_seed(3)
    direction = {n: torch.randn_like(g) for n, g in exact.items()}
    memory, size = build_learner(name, mixer).first_memory(runs, torch.device("cpu")), runs // batches
    found = []
    for start in range(0, runs, size):
        learner = build_learner(name, mixer)
        learner.memory = map_tree(lambda tensor, at=start: tensor[at : at + size], memory)
        mean = learnt(learner, *(z.expand(size, *z.shape[1:]) for z in (x, y, reset)), 8)
        found.append(sum((direction[n] * (g / size - exact[n])).sum() for n, g in mean.items()))
    found = torch.stack(found)
    return float(found.mean().abs() / (found.std() / batches**0.5))


@pytest.mark.parametrize("name", ["uoro", "kf_rtrl"])
def test_the_mean_over_noise_is_the_exact_gradient(name):
    assert standard_errors(name) < 3


def test_the_survey_misprints_the_second_factor_of_uoro(monkeypatch):
    monkeypatch.setattr(stochastic, "rank_one", misprinted)
    assert standard_errors("uoro") > 6


def misprinted(r_0, r_1, JA, nu, B, new):
    """Return A and B by equation 72 as printed."""
    return stochastic.scaled(r_0, JA) + stochastic.scaled(r_1, nu), {
        n: stochastic.scaled(1 / r_0, b) + stochastic.scaled(r_1, new[n]) for n, b in B.items()
    }


def test_uoro_is_its_definition():
    mixer, x, y, steps = leaky_steps()
    mixer.rnn.bias_ih_l0.requires_grad_(False)
    learner = build_learner("uoro", mixer)
    learner.memory = learner.first_memory(1, torch.device("cpu"))
    A, B, total = torch.randn(4, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64), 0
    learner.memory["traces"][""] = {"A": A[None], "B": {n: b[None] for n, b in by_parameter(B).items()}}
    for t, (inputs, D, J, error) in enumerate(steps):
        nu = torch.randn(4, dtype=torch.float64).sign()
        learner.memory["noise"]["signs"][""] = nu[None]
        JA, new = J @ A, torch.outer(nu * D, inputs)
        r_0, r_1 = (B.norm() / JA.norm()).sqrt() + 1e-7, (new.norm() / nu.norm()).sqrt() + 1e-7
        A, B = r_0 * JA + r_1 * nu, B / r_0 + new / r_1
        total = total + (error @ A) * B
        learner.step(x[:, t], y[:, t])
        assert_equal({0: learner.memory["traces"][""]["A"][0]}, {0: A})
    assert_equal(learner.gradients(), by_parameter(total))


def test_kf_rtrl_is_its_definition():
    mixer, x, y, steps = leaky_steps()
    mixer.rnn.bias_ih_l0.requires_grad_(False)
    learner = build_learner("kf_rtrl", mixer)
    learner.memory = learner.first_memory(1, torch.device("cpu"))
    A, B, total = torch.zeros(9, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64), 0
    for t, (a, D, J, error) in enumerate(steps):
        c = torch.randn(2, dtype=torch.float64).sign()
        learner.memory["noise"]["signs"][""] = c[None]
        JB = J @ B
        p_0 = (JB.norm() / A.norm()).sqrt() if t else 1.0
        p_1 = (D.norm() / a.norm()).sqrt()
        A, B = c[0] * p_0 * A + c[1] * p_1 * a, c[0] / p_0 * JB + c[1] / p_1 * D.diag()
        total = total + torch.outer(error @ B, A)
        learner.step(x[:, t], y[:, t])
        assert_equal({0: learner.memory["traces"][""]["B"][0]}, {0: B})
    assert_equal(learner.gradients(), by_parameter(total))


@pytest.mark.parametrize(
    "name, mixer, words",
    [
        ("kf_rtrl", "gru", "one vector"),
        ("d_rtrl", "relit", "`model`"),
        ("uoro", "e_lstm", "`w_f`, `w_z`"),
        ("snap", "lru", "real state"),
    ],
)
def test_layers_that_do_not_fit_are_refused(name, mixer, words):
    with pytest.raises(ValueError, match=words):
        build_learner(name, mixer_of(mixer))


def test_lower_layers_have_the_credit_of_the_same_step():
    # with masks full, snap is exact for the last layer; spatial credit reaches the first
    model, given = stack_of("min_gru"), tokens(steps=12)
    assert_equal(
        learnt(build_learner("snap", model), *given, 4),
        learnt(build_learner("rtrl", model, credit="spatial"), *given, 4),
    )
