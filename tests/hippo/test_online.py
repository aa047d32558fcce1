import math

import numpy as np
import pytest
import torch
from numpy.polynomial import laguerre, legendre

from linrec.hippo import OnlineApproximation, Past, basis
from linrec.testing import assert_agree, generator

KINDS = {
    "legs": {"measure": "legs"},
    "legs, bilinear": {"measure": "legs", "discretization": "bilinear"},
    "legs, decaying": {"measure": "legs", "window": 30},
    "legt": {"measure": "legt", "window": 40.5},
    "lagt": {"measure": "lagt", "window": 8, "discretization": "bilinear"},
    "fout": {"measure": "fout", "window": 40},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, N: int = 6, **changed) -> OnlineApproximation:
    arguments = KINDS[kind] | changed
    return OnlineApproximation(arguments.pop("measure"), N, **arguments)


def signals(time: int = 90) -> torch.Tensor:
    return torch.randn(2, time, 3, generator=generator(), dtype=torch.float64)


def best_polynomial(u: np.ndarray, N: int) -> np.ndarray:
    """Coefficients of held samples u (k,) over the whole past, by the antiderivatives of P_n."""
    edges = np.linspace(-1, 1, len(u) + 1)
    found = []
    for n in range(N):
        whole = legendre.legval(edges, legendre.legint([0] * n + [1]))
        found.append(math.sqrt(2 * n + 1) / 2 * (u * np.diff(whole)).sum())
    return np.array(found)


def test_legs_has_the_best_polynomial_on_all_of_the_past_at_every_step():
    u = signals()
    x, past = make("legs")(u)
    for k in (1, 2, 3, 64, 65, 90):
        expected = torch.from_numpy(best_polynomial(u[1, :k, 2].numpy(), 6))
        assert_agree(x[1, k - 1, 2], expected)
    assert_agree(past.x, x[:, -1])
    assert past.steps == 90


def test_legs_does_not_know_how_fast_time_runs():
    slow = signals(30).repeat_interleave(3, 1)
    approximation = make("legs", 20)
    assert_agree(approximation(slow)[0][:, 2::3], approximation(signals(30))[0])


@pytest.mark.parametrize("measure", ["lagt", "legs"])
def test_fading_memory_weighs_held_samples_by_the_kernel(measure):
    u, window, N = signals(25), 10.0, 5
    # twenty nodes in each step that a sample is held for
    nodes, weights = legendre.leggauss(20)
    ages = (np.arange(25)[:, None] + (nodes + 1) / 2) / window
    if measure == "lagt":
        kernel = laguerre.lagvander(ages, N - 1) * np.exp(-ages / 2)[..., None]
    else:
        kernel = legendre.legvander(2 * np.exp(-ages) - 1, N - 1) * np.exp(-ages)[..., None]
        kernel *= np.sqrt(2 * np.arange(N) + 1)
    weighed = torch.from_numpy((kernel * weights[:, None] / 2).sum(1) / window)
    _, past = OnlineApproximation(measure, N, window=window)(u)
    assert_agree(past.x, torch.einsum("btc,tn->bcn", u.flip(1), weighed))


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("measure", ["legs", "legt", "fout"])
def test_signals_are_read_back_the_better_the_finer_the_steps(measure, discretization):
    """Waves that fit the window, so that what is left is the error of holding samples: of second order."""
    errors, windows = [], 3 if measure == "legs" else 12
    for per_window in (50, 100):
        u = torch.sin(2 * math.tau * (torch.arange(windows * per_window).double() + 0.5) / per_window)
        window = None if measure == "legs" else per_window
        approximation = OnlineApproximation(measure, 61, window=window, discretization=discretization)
        _, past = approximation(u[None, :, None])
        ages = torch.arange(per_window // 4, per_window * 3 // 4) + 0.5
        expected = u.flip(0)[per_window // 4 : per_window * 3 // 4]
        errors.append(float((approximation.reconstruct(past, ages)[0, :, 0] - expected).abs().max()))
    assert errors[0] > 3.5 * errors[1] and errors[1] < 0.03, errors


@every_kind
def test_pieces_are_the_whole(kind):
    approximation, u = make(kind), signals()
    whole, last = approximation(u)
    past, pieces = None, []
    for piece in u.split([1, 0, 1, 70, 18], 1):
        x, past = approximation(piece, past)
        pieces.append(x)
    assert_agree(torch.cat(pieces, 1), whole)
    assert_agree(past.x, last.x)
    assert past.steps == last.steps == 90


@every_kind
def test_signals_do_not_mix(kind):
    approximation, u = make(kind), signals(20)
    alone, _ = approximation(u[1:, :, 2:])
    assert_agree(approximation(u)[0][1:, :, 2:], alone)


@every_kind
def test_gradients_are_finite_differences(kind):
    approximation, u = make(kind, 3), signals(4)[:1, :, :2].requires_grad_()
    past = Past(torch.randn(1, 2, 3, generator=generator(), dtype=torch.float64).requires_grad_(), 5)
    assert torch.autograd.gradcheck(lambda u, x: approximation(u, past._replace(x=x))[0], (u, past.x))


def test_what_was_known_earlier_can_be_read():
    approximation, u = make("legs"), signals()
    x, _ = approximation(u)
    earlier = approximation(u[:, :40])[1]
    ages = torch.tensor([0.0, 12.5, 40.0])
    found = approximation.reconstruct(Past(x[:, 39], 40), ages)
    assert_agree(found, approximation.reconstruct(earlier, ages))
    # relative to the whole past, by polynomials
    expected = earlier.x @ basis("legt", 6, ages.double() / 40).mT
    assert_agree(found, expected.mT)


def test_float32_where_it_is_moved_there():
    approximation, u = make("legt"), signals()
    expected, _ = approximation(u.float())
    assert expected.dtype == torch.float64
    found, past = approximation.float()(u.float())
    assert found.dtype == past.x.dtype == torch.float32
    assert_agree(found, expected)


@every_kind
def test_nothing_is_read_before_the_first_sample(kind):
    approximation = make(kind)
    found = approximation.reconstruct(approximation(signals(0))[1], torch.zeros(1))
    assert torch.equal(found, torch.zeros(2, 1, 3, dtype=torch.float64))


def test_it_has_nothing_to_train_and_nothing_to_save():
    approximation = make("legt")
    assert not list(approximation.parameters()) and not approximation.state_dict()
    assert "'legt', 6, window=40.5, discretization='zoh'" in repr(approximation)


def test_errors_say_what_is_missing():
    with pytest.raises(ValueError, match='`window` must be a number of steps for "legt"; got None'):
        OnlineApproximation("legt", 4)
    with pytest.raises(ValueError, match=r"`window` must be .*; got 0"):
        OnlineApproximation("fout", 4, window=0)
    with pytest.raises(ValueError, match=r"`window` must be .*; got inf"):
        OnlineApproximation("legs", 4, window=math.inf)
    with pytest.raises(ValueError, match="did you mean 'lagt'"):
        OnlineApproximation("lagth", 4, window=3)
    with pytest.raises(ValueError, match="no `discretization` 'zho'; did you mean 'zoh'"):
        OnlineApproximation("legs", 4, discretization="zho")
    with pytest.raises(ValueError, match=r"`u`.*\(batch, time, channels\); got \(5,\)"):
        make("legs")(torch.zeros(5))
    one = make("legs")(signals()[:1])[1]
    with pytest.raises(ValueError, match=r"`past.x`.*\(b, c, N\) = \(2, 3, 6\); got \(1, 3, 6\)"):
        make("legs")(signals(), one)
    for kind, oldest in (("legs", "90"), ("legt", "40.5"), ("lagt", "inf")):
        approximation = make(kind)
        _, past = approximation(signals())
        approximation.reconstruct(past, torch.tensor([min(90, float(oldest))]))
        for age in (-0.5, 90.5)[: 1 if oldest == "inf" else 2]:
            with pytest.raises(ValueError, match=f"`ages`.*0 to {oldest} steps; got {age}"):
                approximation.reconstruct(past, torch.tensor([age]))
