"""Time-invariant diagonal state-space models, one per channel: as a convolution and as a recurrence."""

from jaxtyping import Bool, Float, Inexact
from torch import Tensor, exp

from linrec.ops.core.ambient import exporting
from linrec.ops.core.call import documented, time_is_split
from linrec.ops.core.checks import check_factors, check_shape
from linrec.ops.core.precision import COMPLEX
from linrec.ops.core.stationary import model, oracle
from linrec.ops.diagonal_ssm import torch as in_torch
from linrec.ops.diagonal_ssm.reference import diagonal_ssm_reference
from linrec.ops.diagonal_ssm.torch import DiagonalSSM, GrowingSSM, backends, recurrence

__all__ = ["OPERATOR", "diagonal_ssm"]


def _canonical(given: DiagonalSSM) -> DiagonalSSM:
    """Check shapes and dtypes, and cast the factors to a common dtype."""
    u, a, b, c, state, reset = given
    sums = check_factors(u, {"a": a, "b": b, "c": c}, ("real", "complex"))
    channels = u.shape[2]
    if a.ndim != 2 or len(a) not in (1, channels) or a.shape[1] == 0:
        raise ValueError(
            f"`a` must have shape (d, n) = ({channels}, n) or (1, n), n at least 1; got {tuple(a.shape)}. "
            "Pass n transitions for each channel of `u`, or for all of them."
        )
    check_shape("b", b, "(d, n)", a.shape, "Give it the shape of `a`.")
    check_shape("c", c, "(d, n)", (channels, a.shape[1]), "Pass n factors for each channel of `u`.")
    if a.is_complex() or b.is_complex():
        sums = COMPLEX[sums]
    # with real states, the imaginary part of c has no effect
    c = c.real if c.is_complex() and not sums.is_complex else c
    return DiagonalSSM(u, a.to(sums), b.to(sums), c.to(sums), state, reset)


def _reference(given: DiagonalSSM) -> tuple[Tensor, Tensor]:
    # if time is split, the call must go through `scan`
    if time_is_split():
        return recurrence(given, mode="recurrent", backend="reference")
    return diagonal_ssm_reference(given)


_BACKENDS = [*backends(in_torch.convolution, recurrence), oracle(_reference)]
OPERATOR = model("diagonal_ssm", DiagonalSSM, canonical=_canonical, backends=_BACKENDS, composed=True)
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def diagonal_ssm(
    u: Float[Tensor, "b t d"],
    a: Inexact[Tensor, "#d n"],
    b: Inexact[Tensor, "#d n"],
    c: Inexact[Tensor, "d n"],
    *,
    state: Inexact[Tensor, "b d n"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t d"], Inexact[Tensor, "b d n"]]:
    """Run a diagonal linear state-space model for every channel.

        x_t = a * x_{t-1} + b u_t    y_t = Re(sum_n c_n x_tn)

    The model is time-invariant, so it is also a convolution: y = K * u with K_l = Re(sum_n c_n b_n a_n^l),
    plus the response of the initial state. If a state represents a conjugate pair, pass 2 c.

    {backends}

    `"auto"` uses the convolution. For up to 16 steps, or if time is split over processes, it uses the backend
    that `linrec.ops.scan` would choose. K is computed by matrix products, without materialising (d, n, t)
    numbers, by torch on every device; `backend` selects the convolution. If all channels share transitions,
    pass them with shape (1, n): their powers are then computed only once.

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        a: transitions, real or complex, (d, n), or (1, n) for all channels. Their magnitude is not
            restricted, but |a| > 1 grows exponentially.
        b: input weights, in the shape of `a`. `linrec.ops.discretize_diagonal` returns a and b.
        c: output weights (d, n). a, b and c are in the accumulation dtype: float32 (complex64), or float64
            (complex128) for double inputs.
        state: initial x (b, d, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t.
        mode: "auto", "convolution", "recurrent" or "scan".
        backend: "auto", "torch", "reference", "numba" or "triton".

    Returns:
        y (b, t, d) in the dtype of `u`, and x after the last step, in the accumulation dtype, complex if `a`
        or `b` is complex.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices do not match; (mode, backend) is unknown or cannot run here.

    Source:
        Gu, Gupta, Goel and Ré, S4D (2022), whose kernel is a product with a Vandermonde matrix.

    Example:
        >>> import torch
        >>> u, half, one = torch.ones(1, 3, 1), torch.full((1, 1), 0.5), torch.ones(1, 1)
        >>> y, state = diagonal_ssm(u, half, one, one)
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 1.5, 1.75], [[[1.75]]])
        >>> diagonal_ssm(u[:, :1], half, one, one, state=state)[0].item()
        1.875
    """
    return OPERATOR(DiagonalSSM(u, a, b, c, state, reset), mode, backend)


_OF_GROWTH = backends(in_torch.growing_convolution, in_torch.growing_recurrence)
_GROWING = model("growing_ssm", GrowingSSM, canonical=lambda given: given, backends=_OF_GROWTH, composed=True)


def growing_ssm(given: GrowingSSM, mode: str) -> tuple[Tensor, Tensor]:
    """Run the model of `GrowingSSM`, and return y and the state as `diagonal_ssm` does.

    Outputs of sequences of up to H + 1 steps are correct for any g; outputs of longer sequences are correct
    until they overflow. The state is e^(g H / 2) x, and correct for g H < 170 in single precision. This bound
    also holds for the outputs of exported programs, and if time is split over processes.
    """
    if time_is_split() or exporting():
        # the index of the first step, or the length, is unknown, so the scaling cannot depend on time
        u, a, growth, b, c, horizon, state, reset = given
        half = exp(-growth * (horizon / 2))
        return diagonal_ssm(u, a * exp(growth), b * half, c * half, state=state, reset=reset, mode=mode)
    return _GROWING(given, mode, "auto")
