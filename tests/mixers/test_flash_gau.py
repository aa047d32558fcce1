import itertools

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.flash_gau import FlashGAU
from linrec.nn import groups_of
from linrec.testing import assert_agree, check_reset, check_split, generator, reset_mask

D, TIME, CHUNK = 4, 11, 3
SMALL = {"chunk_size": CHUNK, "d_qk": 6, "init_std": 1.0}
VARIANTS = {
    "paper": {},
    "chunks apart": {"linear": False, "position_bias": "rotary"},
    "linear alone": {"quadratic": False},
    "softmax": {"activation": "softmax", "rotary_base": 100.0},
    "relu": {"activation": "relu", "positions": "none", "position_bias": "none"},
    "steps are chunks": {"chunk_size": 1, "expansion": 1},
    "one chunk": {"chunk_size": 16},
}


def make(d_model: int = D, **arguments) -> FlashGAU:
    torch.manual_seed(0)
    mixer = build("flash_gau", d_model, **arguments)
    assert isinstance(mixer, FlashGAU)
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def resets() -> torch.Tensor:
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 4] = reset[1, 1] = reset[1, 2] = reset[1, 8] = True
    return reset


def silu(x):
    return x * torch.sigmoid(x)


def linear(x, module):
    return x @ module.weight.T + module.bias


def turned(x, position, base):
    """Channels 2 j and 2 j + 1 turned by position base^(-2 j / s)."""
    angle = position * base ** (-torch.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def weights(mixer, x, reset, *, turn=True, base=10_000.0):
    """What V is multiplied by, (b, t, t), pair by pair from the equations."""
    found = torch.zeros(len(x), TIME, TIME, dtype=torch.float64)
    C, s = mixer.chunk_size, mixer.d_qk
    z = silu(linear(x, mixer.z))
    for b in range(len(x)):
        starts = [0, *(int(n) for n in reset[b].nonzero()), TIME]
        for start, stop in itertools.pairwise(starts):
            qk = [
                [mixer.gamma[i, j] * z[b, start:stop] + mixer.beta[i, j] for j in range(len(mixer.gamma[i]))]
                for i in (0, 1)
            ]
            if turn:
                positions = torch.arange(stop - start, dtype=torch.float64)[:, None]
                qk = [[turned(part, positions, base) for part in parts] for parts in qk]
            for n in range(stop - start):
                row = found[b, start + n]
                first = n - n % C
                if mixer.quadratic:
                    bias = [bias_of(mixer, n, m, base) for m in range(first, n + 1)]
                    dots = qk[1][0][first : n + 1] @ qk[0][0][n]
                    if mixer.activation == "softmax":
                        score = (dots / s**0.5 + torch.stack(bias)).softmax(0)
                    else:
                        score = (dots / C + torch.stack(bias)).clamp(min=0)
                        score = score**2 if mixer.activation == "relu2" else score
                    row[start + first : start + n + 1] = score
                if mixer.linear:
                    row[start : start + first] = qk[1][-1][:first] @ qk[0][-1][n] / C
    return found


def bias_of(mixer, n, m, base):
    learned = {} if mixer.bias is None else dict(mixer.bias.named_parameters())
    if not learned:
        return torch.zeros((), dtype=torch.float64)
    if "w" in learned:
        return learned["w"][n - m]
    return turned(learned["a"], m, base) @ turned(learned["b"], n, base)


def options_of(arguments):
    """What the reference has to be told."""
    return {
        "turn": arguments.get("positions") != "none",
        "base": arguments.get("rotary_base", 10_000.0),
    }


@pytest.mark.parametrize("reset", [torch.zeros(2, TIME, dtype=torch.bool), resets()], ids=["one", "several"])
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_and_gradients_are_those_of_the_equations(name, reset):
    mixer = make(**SMALL | VARIANTS[name]).double()
    x = inputs().requires_grad_()
    v, u = silu(linear(x, mixer.v)), silu(linear(x, mixer.u))
    expected = linear(u * (weights(mixer, x, reset, **options_of(VARIANTS[name])) @ v), mixer.out)
    y, _ = mixer(x, reset=reset)
    assert_agree(y, expected)
    wanted = [x, *mixer.parameters()]
    cotangent = torch.randn(y.shape, generator=generator(1), dtype=torch.float64)
    assert_agree(torch.autograd.grad(y, wanted, cotangent), torch.autograd.grad(expected, wanted, cotangent))


@pytest.mark.parametrize("name", VARIANTS)
def test_token_mixing_is_what_values_are_multiplied_by(name):
    mixer = make(**SMALL | VARIANTS[name]).double()
    expected = weights(mixer, inputs(), resets(), **options_of(VARIANTS[name]))
    assert_agree(mixer.token_mixing(inputs(), reset=resets()), expected.abs())


@pytest.mark.parametrize("time", [2, 3, 4, 9, 10])
def test_rows_whose_chunks_begin_at_different_steps_go_on_together(time):
    mixer = make(**SMALL).double()
    _, state = mixer(inputs(), reset=resets())
    assert state.position.tolist() == [7, 3]
    x = torch.randn(2, time, D, generator=generator(5), dtype=torch.float64)
    check_split(mixer, x, at=range(1, time), state=state)
    check_reset(mixer, x, reset=reset_mask(2, time, rate=0.3))


def test_the_state_is_a_window_of_steps_and_the_sum_of_those_before():
    mixer = make(**SMALL, positions="none").double()
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[1, 4] = True
    k, v, S, position = mixer(inputs(), reset=reset)[1]
    z, values = silu(linear(inputs(), mixer.z)), silu(linear(inputs(), mixer.v))
    keys = [mixer.gamma[1, part] * z + mixer.beta[1, part] for part in (0, 1)]
    assert_agree(k, torch.cat(keys, -1)[:, -CHUNK:])
    assert_agree(v, values[:, -CHUNK:])
    for row, start in ((0, 0), (1, 4)):
        assert_agree(S[row], keys[1][row, start:-CHUNK].T @ values[row, start:-CHUNK])
    assert position.tolist() == [TIME, TIME - 4]


def test_state_size_counts_both_parts_or_one():
    e, s = 2 * D, 6
    assert make(**SMALL).state_size == CHUNK * (2 * s + e) + s * e + 1
    assert make(**SMALL, linear=False).state_size == CHUNK * (s + e) + 1
    assert make(**SMALL, quadratic=False).state_size == CHUNK * (s + e) + s * e + 1
    assert make(**SMALL, linear=False).init_state(2).S is None


def test_parameters_are_those_of_the_paper():
    e, s, C = 2 * D, 128, 256
    linears = 2 * (D * e + e) + D * s + s + e * D + D
    for arguments, expected in [
        ({}, linears + 8 * s + C),
        ({"linear": False}, linears + 4 * s + C),
        ({"quadratic": False}, linears + 4 * s),
        ({"position_bias": "rotary"}, linears + 8 * s + 2 * s),
        ({"position_bias": "none"}, linears + 8 * s),
    ]:
        assert sum(p.numel() for p in make(**arguments).parameters()) == expected
    mixer = make(256)
    assert mixer.activation == "relu2"
    for name, parameter in mixer.named_parameters():
        if name.endswith("bias") or name == "beta":
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
    undecayed = {name for name, group in groups_of(mixer).items() if not group.weight_decay}
    assert undecayed == {"gamma", "beta"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "`chunk_size` must be at least 1; got 0. The paper's is 256"),
        ({"quadratic": False, "linear": False}, "`quadratic` and `linear` must not both be False"),
        ({"activation": "relu_2"}, "there is no `activation` 'relu_2'; did you mean 'relu2'"),
        ({"position_bias": "toplitz"}, "there is no `position_bias` 'toplitz'; did you mean 'toeplitz'"),
        ({"positions": "rotar"}, "there is no `positions` 'rotar'; did you mean 'rotary'"),
        ({"d_qk": 5}, "`d_qk` must be even where pairs of channels turn; got 5"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
