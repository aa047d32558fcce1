"""Diagonal state-space models, one per channel, constant in time: as a convolution and as a recurrence."""

from jaxtyping import Bool, Float, Inexact
from torch import Tensor, complex64, promote_types

from linrec.ops import splitting
from linrec.ops.diagonal_ssm.auto import PAIRS, pair_of
from linrec.ops.diagonal_ssm.inputs import check
from linrec.ops.diagonal_ssm.reference import diagonal_ssm_reference
from linrec.ops.diagonal_ssm.torch import convolution, recurrence
from linrec.ops.precision import accumulation, without_autocast

__all__ = ["PAIRS", "diagonal_ssm"]


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

    Nothing depends on time, so the model is also a convolution: y = K * u with K_l = Re(sum_n c_n b_n a_n^l),
    to which the initial state adds its response. Where a state stands for a conjugate pair, pass 2 c.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | convolution | torch | `linrec.ops.long_conv` with K; states are formed once per stretch of time |
    | recurrent, scan | any of `scan` | the states of all steps by `linrec.ops.scan`, kept for the gradients |

    `"auto"` takes the convolution, and for up to 16 steps, or where time is split over processes, what
    `linrec.ops.scan` would. K is made by products of matrices, without its terms, (d, n, t) numbers, and
    by torch on every device; `backend` is handed on to `long_conv`, which chooses for itself with "auto".
    Where all channels have the same transitions, say so: their powers are formed once then.

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        a: transitions, real or complex, (d, n), or (1, n), the same for all channels. Nothing limits their
            size, but |a| > 1 grows exponentially.
        b: factors of the input, of the shape of `a`. `linrec.ops.discretize_diagonal` makes both.
        c: factors of the output (d, n). All three are in the precision of sums: float32 (complex64), or
            float64 (complex128) beside double inputs.
        state: x before the first step (b, d, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t.
        mode: "auto", "convolution", "recurrent" or "scan".
        backend: "auto", "torch", "reference", "numba" or "triton".

    Returns:
        y (b, t, d) in the dtype of `u`, and x after the last step, in the precision of sums: complex where
        any of `a`, `b` and `state` is.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes or devices that do not fit together; a (mode, backend) that does not exist, or that
            cannot run here.

    Source:
        Gu, Gupta, Goel and Ré, S4D (2022), whose kernel is a product with Vandermonde's matrix.

    Example:
        >>> import torch
        >>> u, half, one = torch.ones(1, 3, 1), torch.full((1, 1), 0.5), torch.ones(1, 1)
        >>> y, state = diagonal_ssm(u, half, one, one)
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 1.5, 1.75], [[[1.75]]])
        >>> diagonal_ssm(u[:, :1], half, one, one, state=state)[0].item()
        1.875
    """
    check(u, a, b, c, state, reset)
    pair = pair_of(u, a.shape[1], mode, backend)
    sums = accumulation(u.dtype)
    if any(tensor is not None and tensor.is_complex() for tensor in (a, b, state)):
        sums = promote_types(sums, complex64)
    # a process without steps still hands on what reaches it
    if u.numel() == 0 and splitting.current is None:
        return u.clone(), u.new_zeros(u.shape[0], *c.shape, dtype=sums) if state is None else state.to(
            sums, copy=True
        )
    # with real states, no imaginary part of c has an effect
    c = c.to(sums) if sums.is_complex or not c.is_complex() else c.real
    arguments = (u, a.to(sums), b.to(sums), c, None if state is None else state.to(sums), reset)
    with without_autocast(u.device.type):
        if pair == ("convolution", "torch"):
            y, last = convolution(*arguments, backend)
        elif pair == ("recurrent", "reference") and splitting.current is None:
            y, last = diagonal_ssm_reference(*arguments)
        else:
            y, last = recurrence(*arguments, pair)
    return y.to(u.dtype), last
