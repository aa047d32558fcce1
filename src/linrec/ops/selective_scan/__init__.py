"""The selective state space: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t."""

from collections.abc import Callable

from jaxtyping import Bool, Float

# imported by name, because `torch` is also a module of this package
from torch import Tensor, cat

from linrec.ops.core import checks
from linrec.ops.core.backends import Backend, always, never
from linrec.ops.core.call import Operator, Space, documented
from linrec.ops.core.precision import accumulation
from linrec.ops.selective_scan.numba import recurrent as recurrent_numba
from linrec.ops.selective_scan.reference import selective_scan_reference
from linrec.ops.selective_scan.torch import Group, Outputs, Selective, chunkwise
from linrec.ops.selective_scan.triton import recurrent as recurrent_triton

__all__ = ["OPERATOR", "selective_scan"]


def _canonical(given: Selective) -> Selective:
    """Check shapes, dtypes and values, and add a group axis to B and C."""
    x, dt, A, B, C, D, _, _ = given
    checks.check_axes("x", x, "(b, t, c)", "Add the missing axes, or flatten heads into channels.")
    checks.check_supported("x", x)
    channels = x.shape[2]
    checks.check_shape("dt", dt, "(b, t, c)", x.shape, "Pass one step size per step and channel, as `x` has.")
    if A.ndim != 2 or A.shape[0] != channels or A.shape[1] == 0:
        raise ValueError(
            f"`A` must have shape (c, n) = ({channels}, n), n at least 1; got {tuple(A.shape)}. "
            "Pass one number per channel and state."
        )
    expected = *x.shape[:2], A.shape[1]
    for name, shared in (("B", B), ("C", C)):
        if shared.ndim not in (3, 4) or (*shared.shape[:2], shared.shape[-1]) != expected:
            raise ValueError(
                f"`{name}` must have shape (b, t, n) or (b, t, groups, n), (b, t, n) = {expected}; "
                f"got {tuple(shared.shape)}. Pass one weight per step and state."
            )
    B, C = (shared if shared.ndim == 4 else shared[:, :, None] for shared in (B, C))
    groups = B.shape[2]
    if C.shape[2] != groups or groups == 0 or channels % groups:
        raise ValueError(
            f"`B` and `C` must have the same number of groups, which divides the {channels} channels; got "
            f"{groups} and {C.shape[2]} groups. `expand` a tensor that groups share."
        )
    checks.check_shape("D", D, "(c,)", (channels,), "Pass one number per channel, or None.")
    for name, tensor in (("dt", dt), ("A", A), ("B", B), ("C", C), ("D", D)):
        checks.check_precision(name, tensor, x, "x")
    checks.check_rates("A", A)
    checks.check_steps("dt", dt)
    return given._replace(B=B, C=C)


def _entry(
    mode: str,
    name: str,
    run: Callable[[Group], Outputs],
    about: str,
    auto: Callable[[Selective], bool] = always,
) -> Backend[Selective]:
    """Return an entry of the table whose `run` processes a single group of channels."""

    def by_group(given: Selective) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D, state, reset = given
        assert state is not None
        wide, groups = state.dtype, B.shape[2]
        D = x.new_zeros(x.shape[2], dtype=wide) if D is None else D.to(wide)
        # kernels store states with channels as the last axis
        by_channel = x, dt, A.to(wide).mT[None], D[None], state.mT
        xs, dts, As, Ds, states = ([t] if groups == 1 else t.chunk(groups, -1) for t in by_channel)
        parts = map(Group, xs, dts, As, B.unbind(2), C.unbind(2), Ds, states, [reset] * groups)
        ys, lasts, _ = zip(*map(run, parts), strict=True)
        return (ys[0], lasts[0].mT) if groups == 1 else (cat(ys, 2), cat(lasts, 2).mT)

    # backends convert half precision themselves, chunk by chunk
    return Backend(mode, name, by_group, about, auto=auto, widen=False)


def _single(given: Selective) -> bool:
    # a single step has no states to recompute, and costs less than launching a kernel
    return given.x.shape[1] <= 1


def _output(given: Selective) -> Space:
    return given.x.shape, given.x.dtype


def _state(given: Selective) -> Space:
    return (given.x.shape[0], *given.A.shape), accumulation(given.x.dtype)


BACKENDS = (
    _entry("chunkwise", "torch", chunkwise, "a parallel scan in chunks, a recurrence of chunks", _single),
    _entry("recurrent", "triton", recurrent_triton, "CUDA: a loop, with states in registers"),
    _entry("recurrent", "numba", recurrent_numba, "CPU: a loop, with states in caches"),
    Backend("recurrent", "reference", selective_scan_reference, "a loop over time: the oracle", auto=never),
)
OPERATOR = Operator("selective_scan", Selective, "x", _canonical, _output, "(b, c, n)", _state, BACKENDS)
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def selective_scan(
    x: Float[Tensor, "b t c"],
    dt: Float[Tensor, "b t c"],
    A: Float[Tensor, "c n"],
    B: Float[Tensor, "b t *groups n"],
    C: Float[Tensor, "b t *groups n"],
    D: Float[Tensor, "c"] | None = None,
    *,
    state: Float[Tensor, "b c n"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c n"]]:
    """Run a recurrence of n states per channel with step sizes, input and output weights per step.

        h_tc = exp(dt_tc A_c) h_{t-1,c} + dt_tc x_tc B_t,    h_0 = state
        y_tc = sum_n C_tn h_tcn + D_c x_tc

    exp(dt A) is the zero-order hold of the system h' = A h + B x over a step of length dt. The zero-order
    hold of B is approximated by dt B, as in the paper's code. B and C are shared by all channels, or by the
    channels of a group.

    {backends}

    All backends except the reference save the states before chunks of steps, and recompute the other states
    for the gradient: (b, t, c, n) numbers are never in memory. `"auto"` uses the first entry that supports
    the call; an explicit mode or backend is used or refused. Double backward uses torch operations.

    Args:
        x: input (b, t, c), real, in float32, float64, bfloat16 or float16.
        dt: step sizes (b, t, c), >= 0, in the dtype of `x`, or in float32 with half-precision inputs.
        A: rates (c, n), <= 0; dtypes as for `dt`. Values of A and dt out of range raise an error on the CPU.
            They are not checked on other devices or under torch.compile, where reading them would wait for
            the device.
        B: input weights (b, t, n), or (b, t, groups, n), each for c / groups consecutive channels; dtypes as
            for `dt`.
        C: output weights, in the shape of `B`.
        D: skip weights (c,), dtypes as for `dt`; None omits the skip connection.
        state: h_0 (b, c, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial state.
        mode: "auto", "recurrent" or "chunkwise".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, c) in the dtype of `x`, and h_t (b, c, n) in float32 (float64 for double inputs). For zero
        steps h_t is h_0.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices do not match; values are out of range; (mode, backend) is unknown or
            cannot run here.

    Source:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023), algorithm 2.

    Example:
        Each step halves the state and adds half of the input:

        >>> import torch
        >>> ones = torch.ones(1, 3, 1)
        >>> y, state = selective_scan(ones, 0.5 * ones, 2 * torch.tensor([[0.5]]).log(), ones, ones)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([0.5, 0.75, 0.875], [0.875])
    """
    return OPERATOR(Selective(x, dt, A, B, C, D, state, reset), mode, backend)
