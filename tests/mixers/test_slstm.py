import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.slstm import SLSTM
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import groups_of
from linrec.nn.slstm_steps import slstm_steps
from linrec.testing import assert_agree, generator
from tests.ops.triton_process import INTERPRETED

D, TIME = 6, 7
VARIANTS = [
    {"n_heads": 2},
    {"n_heads": 3, "conv_size": None},
    {"n_heads": 1, "forget_gate": "exponential", "conv_size": 2},
]


def make(d_model: int = D, *, mixing: float = 1.0, **arguments) -> SLSTM:
    torch.manual_seed(0)
    mixer = build("slstm", d_model, **arguments)
    assert isinstance(mixer, SLSTM)
    with torch.no_grad():
        mixer.R.normal_(std=mixing)
    return mixer


def inputs(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer, x):
    """The equations as the paper prints them: h, c, n and f of every step, (b, t, d_model)."""
    seen = x
    if mixer.conv.present:
        # torch's convolution has the taps the other way round
        taps = mixer.conv.weight.flip(-1)[:, None]
        padded = functional.pad(x.mT, (taps.shape[-1] - 1, 0))
        seen = functional.conv1d(padded, taps, mixer.conv.bias, groups=len(taps)).mT
        seen = seen * torch.sigmoid(seen)
    # whole matrices of each gate, in the order i, f, z, o
    W = [torch.block_diag(*gate.weight) for gate in (mixer.i, mixer.f, mixer.z, mixer.o)]
    R = [torch.block_diag(*part).T for part in mixer.R.chunk(4, -1)]
    b = mixer.bias.chunk(4)
    h = c = n = torch.zeros(len(x), mixer.d_model, dtype=x.dtype)
    rows = []
    for t in range(x.shape[1]):
        i, f, z, o = (
            part @ W[g].T + h @ R[g].T + b[g]
            for g, part in enumerate((seen[:, t], seen[:, t], x[:, t], x[:, t]))
        )
        i, f = i.exp(), torch.sigmoid(f) if mixer.sigmoid else f.exp()
        c = f * c + i * torch.tanh(z)
        n = f * n + i
        h = torch.sigmoid(o) * c / n
        rows.append(torch.stack([h, c, n, f]))
    return torch.stack(rows, 2)


def normed(mixer, h):
    heads = h.unflatten(-1, (mixer.n_heads, -1))
    mean, deviation = heads.mean(-1, keepdim=True), heads.var(-1, keepdim=True, unbiased=False)
    return ((heads - mean) / torch.sqrt(deviation + 1e-5)).flatten(-2) * mixer.norm.weight


@pytest.mark.parametrize("arguments", VARIANTS)
def test_outputs_state_and_gradients_are_the_papers_equations(arguments):
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 2)
        mixer.bias.normal_()
    y, state = mixer(x)
    h, c, n, _ = by_hand(mixer, x)
    expected = normed(mixer, h)
    assert_agree(y, expected)
    scale = state.largest.exp()
    end = (state.hidden, state.cell * scale, state.normalizer * scale)
    assert_agree(tuple(part.flatten(1) for part in end), (h[:, -1], c[:, -1], n[:, -1]), "state")
    wanted = [x, *mixer.parameters()]
    weight = torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad((weight * y).sum(), wanted, retain_graph=True)
    assert_agree(found, torch.autograd.grad((weight * expected).sum(), wanted), "gradients")


def test_gates_whose_exponential_overflows():
    mixer = make(n_heads=2, mixing=0.1).double()
    with torch.no_grad():
        mixer.i.weight.mul_(1000)
    x = inputs()
    expected = normed(mixer, by_hand(mixer, x)[0])
    y, state = mixer.float()(x.float())
    assert state.largest.max() > 89
    assert_agree(y, expected)


def test_a_reset_starts_a_new_sequence_whatever_came_before():
    mixer, x = make(n_heads=2), inputs().float()
    with torch.no_grad():
        mixer.i.weight.mul_(100)
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 3] = True
    y, state = mixer(x, reset=reset)
    alone, end = mixer(x[:1, 3:])
    assert_agree(y[:1, 3:], alone)
    assert_agree(tuple(part[:1] for part in state), tuple(end))
    assert_agree(y[1:], mixer(x)[0][1:])


def test_transitions_are_the_forget_gates():
    mixer, x = make(n_heads=2).double(), inputs()
    found = mixer.transitions(x)
    assert_agree(found.magnitude, by_hand(mixer, x)[3])
    assert found.phase is None and mixer.token_mixing(x) is None
    assert mixer.transitions(x[:, :0]).magnitude.shape == (2, 0, D)


def test_the_parts_of_a_first_state_are_apart():
    mixer = make()
    state = mixer.init_state(2)
    state.hidden.fill_(1.0)
    for found, expected in zip(state[2:], mixer.init_state(2)[2:], strict=True):
        assert torch.equal(found, expected)


def test_weights_start_as_in_the_released_code():
    torch.manual_seed(0)
    mixer = build("slstm", 128)
    for gate in (mixer.i, mixer.f, mixer.z, mixer.o):
        assert gate.weight.shape == (4, 32, 32)
        assert gate.weight.std().item() == pytest.approx(math.sqrt(2 / (5 * 128)), rel=0.05)
    assert not mixer.R.any()
    bound = 1 / math.sqrt(128)
    R = build("slstm", 128, recurrent_init="uniform").R
    assert R.abs().max() <= bound
    assert R.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


def test_forget_gates_start_as_their_layers_place_has_them():
    config = ModelConfig(vocab_size=5, d_model=16, n_layers=3, mixer="slstm", mixer_args={"n_heads": 2})
    for mixer, power in zip(LanguageModel(config).mixers, (0.3, 0.95, 1.6), strict=True):
        i, f, z, o = mixer.bias.unflatten(0, (4, 2, 8))
        expected = torch.tensor([5 - 12 * (j / 7) ** power for j in range(8)])
        assert_agree(f, expected.expand(2, 8))
        assert not (i.any() or z.any() or o.any())
    alone = build("slstm", 16, n_heads=2, forget_gate="exponential").bias.chunk(4)[1]
    first = build("slstm", 16, n_heads=2).bias.chunk(4)[1]
    assert_agree(alone.exp(), torch.sigmoid(first))
    # a head of one channel has the first of the biases
    assert build("slstm", 2, n_heads=2).bias.chunk(4)[1].tolist() == [5.0, 5.0]


def test_the_loop_stays_in_float32_under_autocast():
    mixer, x = make(n_heads=2, conv_size=None), inputs().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = mixer(x)
    assert_agree(y, mixer(x)[0])


def test_parameters_and_heads():
    # W and R of four gates in two blocks of four, biases, taps and biases of the convolution, norm
    expected = 2 * 4 * 2 * 16 + 4 * 8 + 5 * 8 + 8
    assert sum(parameter.numel() for parameter in make(8, n_heads=2).parameters()) == expected
    assert [make(d).n_heads for d in (1, 4, 6, 8, 9)] == [1, 1, 2, 4, 1]
    assert make(8).state_size == 4 * 8 + 3 * 8
    assert make(8, conv_size=None).state_size == 4 * 8


def test_no_weight_decay_of_forget_gates():
    kept = {name for name, group in groups_of(make()).items() if not group.weight_decay}
    assert kept == {"f.weight"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"forget_gate": "none"}, "there is no `forget_gate` 'none'"),
        ({"recurrent_init": "zero"}, "there is no `recurrent_init` 'zero'; did you mean 'zeros'"),
        ({"backend": "tritn"}, "there is no `backend` 'tritn'; did you mean 'triton'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on the CPU")
def test_a_named_kernel_is_obeyed_or_refused():
    pytest.importorskip("triton")
    mixer = make(n_heads=2, backend="triton")
    with pytest.raises(ValueError, match="backend='triton' of `slstm_steps` runs on 'cuda'"):
        mixer(inputs().float())


def test_errors_of_the_recurrence():
    Wx, R, start = torch.zeros(2, 3, 4, 2, 5), torch.zeros(2, 5, 20), [torch.zeros(2, 2, 5)] * 4
    reset = torch.zeros(2, 4, dtype=torch.bool)
    for given, options, message in (
        ((Wx[:, :, 0], R, start), {}, "`Wx` must have shape (b, t, 4, h, d); got (2, 3, 2, 5)"),
        ((Wx[:, :, :3], R, start), {}, "`Wx` must have shape (b, t, 4, h, d) = (b, t, 4, h, d); got"),
        ((Wx, R.mT, start), {}, "`R` must have shape (h, d, 4 d) = (2, 5, 20); got (2, 20, 5)"),
        ((Wx, R, [*start[:3], start[0][:1]]), {}, "`largest` must have shape (b, h, d) = (2, 2, 5); got"),
        ((Wx, R, start), {"reset": reset}, "`reset` must have shape (b, t) = (2, 3); got (2, 4)"),
        ((Wx, R, start), {"backend": "numba"}, "`backend` of `slstm_steps` called 'numba'"),
    ):
        with pytest.raises(ValueError) as error:
            slstm_steps(*given, **options)
        assert message in str(error.value)
