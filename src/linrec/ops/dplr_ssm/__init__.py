"""State-space models that are diagonal plus low rank: as a convolution and as a recurrence."""

from collections.abc import Callable

from jaxtyping import Bool, Complex, Float, Inexact
from torch import Tensor

from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.dispatch import SHORT, Pair, exporting, resolve
from linrec.ops.dplr_ssm.inputs import check
from linrec.ops.dplr_ssm.reference import dplr_ssm_reference
from linrec.ops.dplr_ssm.torch import convolution, recurrence
from linrec.ops.precision import accumulation, without_autocast

__all__ = ["PAIRS", "dplr_ssm"]

_RUN: dict[Pair, Callable[..., tuple[Tensor, Tensor]]] = {
    ("recurrent", "reference"): dplr_ssm_reference,
    ("recurrent", "torch"): recurrence,
    ("convolution", "torch"): convolution,
}
PAIRS: tuple[Pair, ...] = tuple(_RUN)


def dplr_ssm(
    u: Float[Tensor, "b t d"],
    a: Complex[Tensor, "d n"],
    p: Complex[Tensor, "d n r"],
    q: Complex[Tensor, "d n r"],
    b: Complex[Tensor, "d n"],
    c: Complex[Tensor, "d n"],
    *,
    state: Inexact[Tensor, "b d n"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t d"], Complex[Tensor, "b d n"]]:
    """Run a linear state-space model for every channel, whose matrix is diagonal plus low rank.

        x_t = a * x_{t-1} - p Re(q^T x_{t-1}) + b u_t    y_t = Re(sum_n c_n x_tn)

    Where an entry of the state stands for a conjugate pair, pass 2 q and 2 c. Nothing depends on time, so the
    model is also a convolution, to which the initial state adds its response. Without p and q, it is
    `linrec.ops.diagonal_ssm`; with a whole matrix, `linrec.ops.dense_ssm`.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | recurrent | torch | a loop over time for the states alone, n (1 + r) numbers a step and no n x n |
    | convolution | torch | `linrec.ops.long_conv`; states are formed once per stretch of time |

    `"auto"` takes the loop for at most 16 steps, else the convolution. Its taps are those of (1 + r)^2
    diagonal models, joined by Woodbury's identity for power series that end where the sequence does; so they
    are exact for any number of steps, without a high power of the matrix. Taps are computed in double
    precision, by torch on every device; `backend` is handed on to `long_conv`, which chooses for itself with
    "auto".

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        a: diagonal (d, n), complex.
        p: factors of the low rank (d, n, r), r at least 1.
        q: the other factors (d, n, r).
        b: factors of the input (d, n).
        c: factors of the output (d, n). All five are complex64, or complex128 beside double inputs. Nothing
            limits the eigenvalues of diag(a) - p q^T or a, but those above 1 grow exponentially.
        state: x before the first step (b, d, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch" or "reference".

    Returns:
        y (b, t, d) in the dtype of `u`, and x after the last step, complex64 or complex128.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes or devices that do not fit together; an unknown (mode, backend).

    Source:
        S4 (Gu, Goel and Ré, 2022): the recurrence after the bilinear transform, and Woodbury's identity for
        its generating function, here not at the roots of unity, but as a series.

    Example:
        A state that is fed back and cancels itself after one step:

        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.complex64)
        >>> y, state = dplr_ssm(torch.ones(1, 3, 1), one, one[..., None], one[..., None], one, one)
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 1.0, 1.0], [[[(1+0j)]]])
    """
    check(u, a, p, q, b, c, state, reset)
    # one program serves all lengths from 2 on: a comparison with any other number would limit them
    few = u.shape[1] <= 1 or (not exporting() and u.shape[1] <= SHORT)
    best: Pair = ("recurrent" if few else "convolution", "torch")
    pair = resolve("dplr_ssm", PAIRS, mode, backend, [best])
    refuse_split_time("dplr_ssm")
    x = u.new_zeros(u.shape[0], *a.shape, dtype=a.dtype) if state is None else state.to(a.dtype)
    if u.numel() == 0:
        return u.clone(), x.clone()
    with without_autocast(u.device.type):
        if pair[0] == "convolution":
            # it leaves out what an initial state of zeros would add
            y, last = convolution(u, a, p, q, b, c, None if state is None else x, reset, backend)
        else:
            y, last = _RUN[pair](u.to(accumulation(u.dtype)), a, p, q, b, c, x, reset)
    return y.to(u.dtype), last
