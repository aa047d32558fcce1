import math

import numpy as np
import pytest
import torch

from linrec.mixers import build
from linrec.mixers.s5 import S5
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, P = 4, 6
CASES = {
    "paper": {},
    "bilinear": {"discretization": "bilinear", "output": "glu", "n_blocks": 3},
    "alone": {"activation": False, "output": "none"},
    "one step": {"shared_step": True},
    "linear": {"output": "linear", "discretization": "bilinear"},
    "gate of GELU": {"output": "half_glu2", "C_init": "complex_normal"},
    "no pairs": {"pairs": False, "n_blocks": 2},
    "finer": {"step_rescale": 0.5, "approximate": "tanh"},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int | None = P, **arguments) -> S5:
    torch.manual_seed(0)
    mixer = build("s5", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, S5)
    return mixer


def moved(mixer: S5) -> S5:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def complex_matrices(mixer):
    """B (P / 2, d_model) and C (d_model, P / 2), or all P."""
    return mixer.B[0::2] + 1j * mixer.B[1::2], mixer.C[:, 0::2] - 1j * mixer.C[:, 1::2]


def by_hand(mixer, x, state, intervals):
    """The paper's equations step by step, with both of each pair and matrices for what is diagonal.

    Without pairs, an entry has no other beside it, and the real part of y is taken.
    """
    B, C = complex_matrices(mixer)
    Lambda = -mixer.A_log.exp() + 1j * mixer.A_imag
    dt = mixer.step_rescale * mixer.dt_log.exp().expand(len(Lambda))
    h, outputs = state, []
    if mixer.pairs:
        Lambda, B = torch.cat([Lambda, Lambda.conj()]), torch.cat([B, B.conj()])
        C, h, dt = torch.cat([C, C.conj()], 1), torch.cat([state, state.conj()], 1), dt.repeat(2)
    A, Delta = torch.diag(Lambda), torch.diag(dt + 0j)
    one = torch.eye(len(A), dtype=A.dtype)
    for k in range(x.shape[1]):
        rows = []
        for b in range(len(x)):
            dt = Delta * intervals[b, k]
            if mixer.discretization == "zoh":
                Abar = torch.matrix_exp(A @ dt)
                Bbar = torch.linalg.solve(A, (Abar - one) @ B)
            else:
                inverse = torch.linalg.inv(one - A @ dt / 2)
                Abar, Bbar = inverse @ (one + A @ dt / 2), inverse @ dt @ B
            rows.append(Abar @ h[b] + Bbar @ (x[b, k] + 0j))
        h = torch.stack(rows)
        y = h @ C.T
        assert not mixer.pairs or y.imag.abs().max() < 1e-10
        outputs.append(y.real + mixer.D * x[:, k])
    y = torch.stack(outputs, 1)
    if mixer.approximate == "none":
        z = y * (1 + torch.erf(y / math.sqrt(2))) / 2 if mixer.activation else y
    else:
        z = y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2
    if mixer.output != "none":
        gate = z @ mixer.out.weight.T + mixer.out.bias
        if mixer.output == "half_glu":
            z = z / (1 + torch.exp(-gate))
        elif mixer.output == "half_glu2":
            z = y / (1 + torch.exp(-gate))
        elif mixer.output == "glu":
            z = gate[..., :D] / (1 + torch.exp(-gate[..., D:]))
        else:
            z = gate
    return z, h[:, : state.shape[1]]


@every_case
@pytest.mark.parametrize("irregular", [False, True])
def test_the_layer_and_its_gradients_are_the_papers_equations(case, irregular):
    mixer = moved(make(**CASES[case]))
    x = draw(2, 7, D).requires_grad_()
    state = draw(2, mixer.state_size, seed=1, dtype=torch.complex128).requires_grad_()
    intervals = 3 * torch.rand(2, 7, generator=generator(2), dtype=torch.float64)
    intervals = (intervals if irregular else torch.ones_like(intervals)).requires_grad_()
    ours = mixer(x, state, dt=intervals if irregular else None)
    theirs = by_hand(mixer, x, state, intervals)
    assert_agree(ours, theirs)
    wanted = [x, state, *mixer.parameters(), *([intervals] if irregular else [])]
    assert_agree(
        torch.autograd.grad(ours[0].square().sum(), wanted),
        torch.autograd.grad(theirs[0].square().sum(), wanted),
    )


def test_a_held_input_may_be_sampled_at_any_times():
    """With a zero-order hold, two parts of a step are the step, and a step of no time is none."""
    mixer, x = moved(make()), draw(2, 5, D)
    whole, last = mixer(x)
    parts = torch.tensor([0.3, 0.0, 0.7]).double().repeat(2, 5)
    finer, end = mixer(x.repeat_interleave(3, 1), dt=parts)
    assert_agree(finer[:, 2::3], whole)
    assert_agree(end, last)


def test_both_modes_of_the_scan_agree_over_16384_steps(monkeypatch):
    from linrec.mixers import s5

    mixer, x = make(2, 16), torch.randn(1, 16_384, 2, generator=generator())
    scan, found = s5.scan, []
    for mode in ("recurrent", "scan"):
        monkeypatch.setattr(s5, "scan", lambda a, x, mode=mode, **given: scan(a, x, mode=mode, **given))
        found.append(mixer(x))
    (y, h), (z, g) = found
    assert (y - z).abs().max() < 1e-3 and (h - g).abs().max() < 1e-3


@pytest.mark.parametrize("n_blocks", [1, 3])
def test_it_starts_as_blocks_of_the_normal_part_of_hippo(n_blocks):
    block = 8
    mixer = make(64, block * n_blocks, n_blocks=n_blocks).requires_grad_(False)
    n = np.arange(block)
    r = np.sqrt(2 * n + 1)
    A = -np.tril(np.outer(r, r), -1) - np.diag(n + 1.0)
    values = np.linalg.eigvals(A + np.outer(r, r) / 2)
    expected = np.sort(values.imag[values.imag > 0])
    np.testing.assert_allclose(
        mixer.A_imag.reshape(n_blocks, -1), expected[None].repeat(n_blocks, 0), rtol=1e-5
    )
    assert_agree(mixer.A_log, torch.full_like(mixer.A_log, math.log(0.5)))


def test_where_matrices_and_steps_start():
    d_model, d_state = 256, 128
    mixer = make(d_model, d_state, n_blocks=2, dt_min=0.01, dt_max=1.0).requires_grad_(False)
    B, C = complex_matrices(mixer)
    # V^* times a matrix of variance 1 / d_state, as JAX counts the rows of `lecun_normal`'s matrix for its
    # inputs, and one whose parts have variance 1 / d_state, times V
    assert B.abs().square().mean() == pytest.approx(1 / d_state, rel=0.05)
    assert C.abs().square().mean() == pytest.approx(2 / d_state, rel=0.05)
    assert B.real.mean().abs() < 0.01 and C.real.mean().abs() < 0.01
    assert mixer.D.var() == pytest.approx(1, rel=0.2)
    _, C = complex_matrices(make(d_model, d_state, C_init="lecun_normal").requires_grad_(False))
    assert C.abs().square().mean() == pytest.approx(2 / (d_state * d_model), rel=0.05)
    _, C = complex_matrices(make(d_model, d_state, C_init="complex_normal").requires_grad_(False))
    assert C.shape == (d_model, d_state // 2)
    assert C.real.var() == pytest.approx(0.5, rel=0.05) and C.imag.var() == pytest.approx(0.5, rel=0.05)
    assert (C.real * C.imag).mean().abs() < 0.02
    share = (mixer.dt_log - math.log(0.01)) / math.log(100)
    assert mixer.dt_log.shape == (64,) and 0 <= share.min() < 0.1 and 0.9 < share.max() <= 1


def test_b_starts_as_a_real_matrix_in_the_basis_of_the_eigenvectors():
    from linrec.hippo import diagonal

    mixer = make(5, 16, n_blocks=2).double()
    _, _, V = diagonal("legs", 8)
    B, _ = complex_matrices(mixer)
    for block in B.detach().unflatten(0, (2, 4)):
        real = 2 * (V @ block).real
        assert_agree(V.mH @ real.to(V), block, dtype=torch.float32)


def test_parameters_and_their_groups():
    mixer = make(d_state=6)
    sizes = {name: tuple(w.shape) for name, w in mixer.named_parameters()}
    assert sizes == {
        "A_log": (3,),
        "A_imag": (3,),
        "dt_log": (3,),
        "B": (6, D),
        "C": (D, 6),
        "D": (D,),
        "out.weight": (D, D),
        "out.bias": (D,),
    }
    groups = groups_of(mixer)
    slow = {name for name, group in groups.items() if group.name == "transition" and not group.weight_decay}
    assert slow == {"A_log", "A_imag", "dt_log", "B"}
    assert make(shared_step=True).dt_log.shape == (1,)
    # the next number that has pairs in every block
    assert make(5, None).d_state == 6 and make(5, None, n_blocks=4).d_state == 8
    assert make(5, None, pairs=False).d_state == 5


def test_without_conjugate_symmetry_a_state_starts_with_both_of_each_pair():
    one, both = make(), make(pairs=False)
    assert one.state_size == P // 2 and both.state_size == P
    values = torch.complex(-both.A_log.exp(), both.A_imag)
    expected = torch.complex(-one.A_log.exp(), one.A_imag)
    found = values[values.imag > 0]
    assert_agree(found[found.imag.argsort()], expected[expected.imag.argsort()])
    assert_agree(values.imag.sort().values, -values.imag.sort(descending=True).values)
    B, _ = complex_matrices(both)
    up, down = both.A_imag > 0, both.A_imag < 0
    order = [both.A_imag[side].abs().argsort() for side in (up, down)]
    # of a real matrix, what conjugate eigenvectors give is conjugate
    assert_agree(B[up][order[0]], B[down][order[1]].conj())


def test_transitions_are_lambdabar():
    mixer = moved(make())
    magnitude, phase = mixer.transitions(draw(2, 3, D))
    expected = torch.exp((-mixer.A_log.exp() + 1j * mixer.A_imag) * mixer.dt_log.exp())
    assert_agree(magnitude * torch.exp(1j * phase), expected)


def test_errors_say_what_is_wrong():
    for arguments, message in (
        ({"d_state": 5}, "`d_state` must be a positive multiple of 2 `n_blocks` = 2.*; got 5"),
        ({"d_state": 0}, "`d_state` must be a positive multiple of 2 `n_blocks` = 2.*; got 0"),
        ({"n_blocks": 2}, "`d_state` must be a positive multiple of 2 `n_blocks` = 4.*; got 6"),
        ({"n_blocks": 4, "pairs": False}, "`d_state` must be a positive multiple of `n_blocks` = 4.*; got 6"),
        ({"n_blocks": 0}, "`n_blocks` must be at least 1; got 0"),
        ({"discretization": "euler"}, "no `discretization` 'euler'"),
        ({"output": "half-gluu"}, "no `output` 'half-gluu'; did you mean 'half_glu'"),
        ({"C_init": "normal"}, "no `C_init` 'normal'; did you mean 'lecun_normal'"),
        ({"output": "half_glu2", "activation": False}, "needs `activation=True`, .*; got False"),
        ({"approximate": "erf"}, "no `approximate` 'erf'"),
        ({"step_rescale": 0.0}, "`step_rescale` must be positive and finite; got 0.0"),
        ({"dt_min": 0.0}, "A step of zero never moves"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)
