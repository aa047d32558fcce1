import torch

from linrec.nn.trapezoid import TrapezoidState, trapezoidal_gate_loop
from linrec.ops.gate_loop import gate_loop
from linrec.testing import assert_agree, check_split, check_steps, generator, reset_mask

TIME = 9


def inputs(time: int = TIME) -> list[torch.Tensor]:
    """q, k, v, log a, dt and the weight of the current step."""
    q, k = (torch.randn(2, time, 3, 4, generator=generator(s), dtype=torch.float64) for s in (0, 1))
    v = torch.randn(2, time, 3, 2, generator=generator(2), dtype=torch.float64)
    log_a, dt, weight = torch.rand(3, 2, time, 3, generator=generator(3), dtype=torch.float64)
    return [q, k, v, -log_a, 2 * dt, weight]


def start() -> TrapezoidState:
    state = TrapezoidState.zeros(2, 3, 4, 2, dtype=torch.float64)
    return TrapezoidState(*(torch.randn(part.shape, generator=generator(4)).double() for part in state))


def test_a_loop_over_time_gives_the_same():
    q, k, v, log_a, dt, weight = inputs()
    state, reset = start(), reset_mask(2, TIME, rate=0.2)
    S, past = state.S, state.k.unflatten(-1, (3, 4, 1)) * state.v.unflatten(-1, (3, 1, 2))
    outputs = []
    for t in range(TIME):
        a, step, share = (part[:, t, :, None, None] for part in (log_a.exp(), dt, weight))
        S, past = (part.masked_fill(reset[:, t, None, None, None], 0) for part in (S, past))
        new = k[:, t, :, :, None] * v[:, t, :, None]
        S, past = a * S + (1 - share) * step * a * past + share * step * new, new
        outputs.append((q[:, t, :, None] @ S).squeeze(-2))
    assert reset[:, 1:].any()
    y, last = trapezoidal_gate_loop(q, k, v, log_a, dt, weight, state=state, reset=reset)
    assert_agree([y, last.S], [torch.stack(outputs, 1), S])


def test_eulers_rule_is_the_operator_with_keys_times_steps():
    q, k, v, log_a, dt, _ = inputs()
    y, state = trapezoidal_gate_loop(q, k, v, log_a, dt, 1.0)
    assert_agree([y, state.S], [*gate_loop(q, dt[..., None] * k, v, log_a)])


def test_calls_with_a_state_equal_a_single_call():
    def function(x, state=None, *, reset=None):
        return trapezoidal_gate_loop(*x, state=state, reset=reset)

    check_split(function, inputs(), state=start())
    check_steps(function, inputs(), start())
