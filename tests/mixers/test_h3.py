import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.h3 import H3
from linrec.nn import groups_of
from linrec.nn.state_space import spectrum
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator, reset_mask

D, N = 4, 6
CASES = {
    "paper": {},
    "heads of two channels": {"n_heads": 2, "init": "legs", "discretization": "zoh"},
    "one head": {"n_heads": 1, "init": "real"},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int = N, **arguments) -> H3:
    torch.manual_seed(0)
    mixer = build("h3", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, H3)
    return mixer


def moved(mixer: H3) -> H3:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 25) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def shift_by_hand(mixer: H3, k: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """x_t = A x_{t-1} + B k_t with A the shift matrix, one channel after the other, over all keys."""
    A = torch.diag(torch.ones(mixer.shift_B.shape[1] - 1, dtype=k.dtype), -1)
    keys, outputs = torch.cat([past, k], 1), []
    for d in range(D):
        x, y = torch.zeros(len(k), len(A), dtype=k.dtype), []
        for t in range(keys.shape[1]):
            x = x @ A.T + keys[:, t, d, None] * mixer.shift_B[d]
            y.append(x @ mixer.shift_C[d] + mixer.shift_D[d] * keys[:, t, d])
        outputs.append(torch.stack(y[past.shape[1] :], 1))
    return torch.stack(outputs, -1)


def by_hand(mixer: H3, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]):
    past, S = state
    a, b, c = mixer.diagonal.discrete()
    q, k, v = (x @ layer.weight.T + layer.bias for layer in (mixer.q, mixer.k, mixer.v))
    past = torch.cat([past, k], 1)[:, -past.shape[1] :], shift_by_hand(mixer, k, past)
    tail, k = past
    width, o = mixer.d_head, []
    for t in range(x.shape[1]):
        heads, after = [], []
        for h in range(mixer.n_heads):
            part = slice(h * width, (h + 1) * width)
            outer = k[:, t, part, None] * v[:, t, None, part]
            z = S[:, :, :, h] * a[h] + outer[..., None] * b[h]
            KV = (z * c[h]).sum(-1).real + mixer.diagonal.D[h] * outer
            heads.append((q[:, t, None, part] @ KV)[:, 0])
            after.append(z)
        S = torch.stack(after, 3)
        o.append(torch.cat(heads, -1))
    return torch.stack(o, 1) @ mixer.out.weight.T + mixer.out.bias, (tail, S)


@every_case
@pytest.mark.parametrize("mode", ["convolution", "recurrent"])
def test_the_layer_and_its_gradients_are_the_papers_equations(case, mode):
    mixer, x = moved(make(**CASES[case], mode=mode)), inputs().requires_grad_()
    state = tuple(
        torch.randn(part.shape, generator=generator(seed), dtype=part.dtype).requires_grad_()
        for seed, part in enumerate(mixer.init_state(2))
    )
    ours, theirs = mixer(x, state), by_hand(mixer, x, state)
    assert_agree(ours, theirs)
    wanted = [x, *state, *mixer.parameters()]
    (y, ends), (z, others) = ours, theirs
    outputs = [torch.randn(part.shape, generator=generator(2), dtype=part.dtype) for part in (y, *ends)]
    assert_agree(
        torch.autograd.grad([y, *ends], wanted, outputs), torch.autograd.grad([z, *others], wanted, outputs)
    )


def test_convolution_and_recurrence_agree_over_16384_steps_in_float32():
    x = torch.randn(1, 16_384, 2, generator=generator())
    (y, ends), (z, others) = (make(2, 64, mode=mode)(x) for mode in ("convolution", "recurrent"))
    for mine, other in ((y, z), *zip(ends, others, strict=True)):
        mine, other = mine.detach(), other.detach()
        assert float((mine - other).abs().max()) < 1e-3 * max(1.0, float(other.abs().max()))


def test_a_value_is_recalled_by_the_key_before_it():
    """The shift pairs a key with the value of the next step, as the paper's associative recall has it."""
    mixer = make(4, 2, n_heads=1, init="real").double().requires_grad_(False)
    for layer in (mixer.q, mixer.k, mixer.v, mixer.out):
        layer.weight.copy_(torch.eye(4))
        layer.bias.zero_()
    # the shift by one step, and a diagonal model that adds up
    mixer.shift_C.copy_(torch.tensor([0.0, 1.0]).expand(4, 2))
    for parameter in (mixer.shift_D, mixer.diagonal.D):
        parameter.zero_()
    for parameter, value in ((mixer.diagonal.A_log, -40.0), (mixer.diagonal.dt_log, 0.0)):
        parameter.fill_(value)
    mixer.diagonal.C.copy_(torch.tensor([[1.0, 0.0]]))
    names = torch.eye(4, dtype=torch.float64)
    y, _ = mixer(names[[0, 2, 1, 3, 0]][None])
    # the last query is the first key, whose value came one step later
    assert_agree(y[0, -1], names[2])


def test_parameters_and_where_they_start():
    d, n = 400, 16
    mixer = make(d, n).requires_grad_(False)
    of_diagonal = d * (1 + n // 2 + n // 2 + n + n + 1)
    assert sum(p.numel() for p in mixer.parameters()) == 4 * (d * d + d) + 2 * d * n + d + of_diagonal
    assert mixer.state_size == d * (n - 1) + d * n // 2
    assert mixer.shift_B.unique(dim=0).tolist() == [[1] + [0] * (n - 1)]
    bound = 1 / math.sqrt(n)
    assert 0.99 * bound < float(mixer.shift_C.abs().max()) <= bound
    assert float(mixer.shift_C.var()) == pytest.approx(bound**2 / 3, rel=0.05)
    assert float(mixer.shift_D.var()) == pytest.approx(1, abs=0.15)
    with recording() as calls:
        mixer(torch.zeros(1, 1, d))
    assert_agree(calls[0].inputs.kernel[:, 1:], mixer.shift_C[:, 1:])
    A, _ = spectrum("lin", n)
    assert_agree(torch.complex(-mixer.diagonal.A_log.exp(), mixer.diagonal.A_imag), A.cfloat().expand(d, -1))
    assert make(8).d_head == 1 and make(8, n_heads=2).diagonal.A_log.shape == (2, N // 2)
    of = groups_of(mixer)
    marked = [name for name, group in of.items() if (group.name, group.weight_decay) == ("transition", False)]
    names = ["shift_B", *(f"diagonal.{name}" for name in ("dt_log", "A_log", "A_imag", "B"))]
    assert sorted(marked) == sorted(names)
    assert of["shift_C"].name == "channel" and of["shift_D"].name == "default"


@every_case
def test_inspection(case):
    mixer, x = moved(make(**CASES[case])), inputs(6)
    tail, start = mixer.init_state(2)
    one = torch.randn(start.shape, generator=generator(1), dtype=start.dtype)
    left = mixer(x[:, :1], (tail, one))[1][1] - mixer(x[:, :1])[1][1]
    a = torch.polar(*mixer.transitions(x)).reshape(mixer.n_heads, -1)
    assert_agree(left, a * one if start.is_complex() else a.real * one)

    # a change of one value reaches a head's outputs by the weights
    reset = reset_mask(2, 6, rate=0.3)
    mixer.out.weight.data.copy_(torch.eye(D))
    expected = torch.zeros(2, 6, 6, dtype=torch.float64)
    y, _ = mixer(x, reset=reset)
    for m in range(6):
        hook = mixer.v.register_forward_hook(lambda _, __, v, m=m: v + (torch.arange(6) == m)[:, None])
        change = (mixer(x, reset=reset)[0] - y).unflatten(-1, (mixer.n_heads, -1))
        hook.remove()
        assert_agree(change, change[..., :1].expand_as(change))
        expected[:, :, m] = change[..., 0].abs().mean(-1)
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_errors():
    for message, arguments in {
        "`d_model` must be a positive multiple of `n_heads` = 3; got 4": {"n_heads": 3},
        "`d_state` must be a positive even number, of conjugate pairs; got 5": {"d_state": 5},
        "there is no `init` 'line'; did you mean 'lin'": {"init": "line"},
        "0 < dt_min <= dt_max; got 0 and 0.1": {"dt_min": 0},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match=r"`state` must be that of .*; got \(a tensor \(3, "):
        mixer = make()
        mixer(inputs().float(), mixer.init_state(3))
