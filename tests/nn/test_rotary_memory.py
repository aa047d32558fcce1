import pytest
import torch

from linrec.nn.rotary import Rotary
from linrec.nn.rotary_memory import rotary_gate_loop
from linrec.ops import gate_loop
from linrec.testing import assert_agree, generator

ROTARY = Rotary(4, base=50.0)
DECAY = torch.tensor([-0.1, -0.2, 0.0], dtype=torch.float64)


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
