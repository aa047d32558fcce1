import math

import numpy as np
import pytest
import torch

from linrec.nn.rotary import Rotary, rotary_gate_loop, running_turns
from linrec.ops import gate_loop
from linrec.testing import assert_agree, generator

ROTARY = Rotary(4, base=50.0)
DECAY = torch.tensor([-0.1, -0.2, 0.0], dtype=torch.float64)


def vectors(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=generator(len(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("d_head", "base"), [(2, 10_000.0), (6, 10_000.0), (8, 100.0)])
def test_rotary_is_a_complex_product(d_head, base):
    x = vectors(2, 5, 3, d_head)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 2, 1000, 5]])
    theta = base ** (-np.arange(0, d_head, 2) / d_head)
    turns = np.exp(1j * positions.numpy()[:, :, None, None] * theta)
    expected = (x.numpy()[..., 0::2] + 1j * x.numpy()[..., 1::2]) * turns
    turned, again = Rotary(d_head, base=base)(positions, x, 2 * x)
    np.testing.assert_allclose(turned[..., 0::2], expected.real, atol=1e-12)
    np.testing.assert_allclose(turned[..., 1::2], expected.imag, atol=1e-12)
    assert_agree(again, 2 * turned)


def test_a_fraction_of_the_channels_turns_as_a_narrower_head():
    x, positions = vectors(2, 5, 3, 10), torch.arange(5)[None]
    for fraction, channels in ((0.4, 4), (0.25, 2), (1.0, 10)):
        (turned,) = Rotary(10, base=50.0, fraction=fraction)(positions, x)
        (expected,) = Rotary(channels, base=50.0)(positions, x[..., :channels])
        assert_agree(turned, torch.cat([expected, x[..., channels:]], -1))


def test_compiled_rotary_is_the_same_function():
    rotary, x = Rotary(6), vectors(2, 5, 3, 6, dtype=torch.bfloat16)
    positions = torch.arange(5)[None]
    compiled = torch.compile(rotary, fullgraph=True, backend="eager")
    assert_agree(compiled(positions, x.float()), rotary(positions, x.float()))
    assert_agree(compiled(positions, x), rotary(positions, x))


def test_memory_of_any_layout():
    rotary, x = Rotary(6), vectors(2, 5, 3, 7)
    positions = torch.arange(5)[None]
    for strided in (x[..., 1:], x[..., :6], x.transpose(0, 1).contiguous().transpose(0, 1)[..., 1:]):
        assert_agree(rotary(positions, strided), rotary(positions, strided.contiguous()))


def test_products_depend_on_the_difference_of_positions():
    rotary, (q, k) = Rotary(8), vectors(2, 1, 6, 2, 8)

    def scores(first: int) -> torch.Tensor:
        turned_q, turned_k = rotary(torch.arange(first, first + 6)[None], q, k)
        return torch.einsum("bnhc,bmhc->bhnm", turned_q, turned_k)

    near = scores(0)
    assert_agree(scores(123_456_789), near, dtype=torch.float32)
    assert_agree(scores(1000), near)
    # and they do depend on it
    assert (near - torch.einsum("bnhc,bmhc->bhnm", q, k)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_keep_their_digits_at_long_positions(dtype):
    x = vectors(1, 4, 1, 8, dtype=dtype)
    positions = torch.tensor([[0, 1_000_000, 16_777_217, 2**40]])
    (turned,) = Rotary(8)(positions, x)
    (expected,) = Rotary(8)(positions, x.double())
    assert turned.dtype == dtype
    # a rounding of the result, and of what it is rounded from
    torch.testing.assert_close(turned.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_gradients_turn_back():
    rotary, positions = Rotary(4), torch.tensor([[3, 50]])
    x = vectors(1, 2, 1, 4).requires_grad_()
    y = vectors(2, 1, 1, 4).transpose(0, 1)
    (turned,) = rotary(positions, x)
    (gradient,) = torch.autograd.grad(turned, x, y)
    assert_agree(rotary(positions, gradient)[0], y)


def test_a_length_of_zero():
    (turned,) = Rotary(4)(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(2, 0, 3, 4))
    assert turned.shape == (2, 0, 3, 4)


@pytest.mark.parametrize("d_head", [0, 5])
def test_pairs_need_an_even_width(d_head):
    with pytest.raises(ValueError, match=f"`d_head`.* got {d_head}"):
        Rotary(d_head)


def test_the_base_is_positive():
    with pytest.raises(ValueError, match=r"`base` .*got 0"):
        Rotary(4, base=0)
    # the paper's is 10,000; any other turns too
    cos, _ = Rotary(4, base=0.5).turns(torch.tensor([[1]]), torch.float64)
    assert_agree(cos.flatten(), torch.tensor([1.0, 0.5**-0.5], dtype=torch.float64).cos())


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.1, 1.5])
def test_a_fraction_leaves_pairs(fraction):
    with pytest.raises(ValueError, match=f"6.*got {fraction}"):
        Rotary(6, fraction=fraction)


def test_running_turns_are_those_of_the_sums_since_the_last_reset():
    angles = 4 * torch.rand(2, 50, 3, 2, generator=generator(), dtype=torch.float64)
    reset = torch.zeros(2, 50, dtype=torch.bool)
    reset[1, 30] = True
    sums = angles.cumsum(1)
    sums[1, 30:] = angles[1, 30:].cumsum(0)
    expected = sums.cos(), sums.sin()
    turns, last = running_turns(angles, reset=reset)
    assert_agree(turns, expected)
    assert_agree(last, sums[:, -1].flatten(1).remainder(2 * math.pi))
    first, carried = running_turns(angles[:, :10], reset=reset[:, :10])
    rest, end = running_turns(angles[:, 10:], carried, reset=reset[:, 10:])
    assert_agree(tuple(torch.cat(parts, 1) for parts in zip(first, rest, strict=True)), expected)
    assert_agree(end, last)
    # nothing before a reset reaches the sums after it
    angles[1, 20] = math.nan
    (cos, sin), last = running_turns(angles, reset=reset)
    assert cos[1, 20:30].isnan().all()
    assert_agree((cos[1, 30:], sin[1, 30:], last), (expected[0][1, 30:], expected[1][1, 30:], end))


def inputs(time: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    random = generator()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=dtype).requires_grad_()

    return {"q": normal(2, time, 3, 4), "k": normal(2, time, 3, 4), "v": normal(2, time, 3, 5)}


def complex_recurrence(q, k, v, log_decay, state, reset):
    """Return what the docstring says: the recurrence of complex numbers."""
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k))
    theta = 50.0 ** (-torch.arange(2, dtype=torch.float64) / 2)
    phase = theta.expand(3, -1)
    return gate_loop(q, k.conj(), v, log_decay, phase, state=state, reset=reset, backend="reference")


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("time", [1, 2, 70])
def test_it_is_the_complex_recurrence(decay: str, time: int) -> None:
    given = inputs(time)
    shape = {"none": None, "head": (3,), "channel": (2, time, 3, 2)}[decay]
    log_decay = None if shape is None else -torch.rand(shape, generator=generator(), dtype=torch.float64)
    state = torch.randn(2, 3, 2, 5, generator=generator(), dtype=torch.complex128).requires_grad_()
    reset = torch.zeros(2, time, dtype=torch.bool)
    reset[0, time // 2] = True
    found = rotary_gate_loop(ROTARY, *given.values(), log_decay, state=state, reset=reset)
    expected = complex_recurrence(*given.values(), log_decay, state, reset)
    assert_agree(found, expected)
    leaves = [*given.values(), state]
    gradients = [
        torch.autograd.grad(y.square().sum() + last.abs().square().sum(), leaves)
        for y, last in (found, expected)
    ]
    assert_agree(*gradients)


def test_pieces_and_steps_are_the_whole() -> None:
    given = inputs(9)
    whole, last = rotary_gate_loop(ROTARY, *given.values(), DECAY)
    pieces, state = [], None
    for length, start in ((3, 0), (1, 3), (5, 4)):
        part = [x[:, start : start + length] for x in given.values()]
        y, state = rotary_gate_loop(ROTARY, *part, DECAY, state=state)
        pieces.append(y)
    assert_agree((torch.cat(pieces, 1), state), (whole, last))


def test_a_long_sequence_keeps_its_phases() -> None:
    # 1e5 steps from the only key to the only query
    time = 100_000
    q, k, v = (torch.zeros(1, time, 1, width) for width in (2, 2, 1))
    q[:, -1, :, 0] = k[:, 0, :, 0] = v[:, 0] = 1
    y, state = rotary_gate_loop(Rotary(2), q, k, v)
    angle = torch.tensor(float(time - 1), dtype=torch.float64)
    torch.testing.assert_close(y[0, -1, 0, 0].double(), angle.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(state.flatten()[0].imag.double(), angle.sin(), rtol=0, atol=1e-6)


def test_half_precision_is_as_near_as_its_rounding() -> None:
    given = inputs(64, torch.float32)
    exact, _ = rotary_gate_loop(ROTARY, *given.values(), torch.full((3,), -0.1))
    half = [x.bfloat16() for x in given.values()]
    y, state = rotary_gate_loop(ROTARY, *half, torch.full((3,), -0.1))
    assert y.dtype == torch.bfloat16 and state.dtype == torch.complex64
    assert (y - exact).norm() < 0.01 * exact.norm()
