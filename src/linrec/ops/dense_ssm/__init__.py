"""State-space models with whole matrices, constant in time: as a convolution and as a recurrence."""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.dense_ssm.inputs import canonical, check
from linrec.ops.dense_ssm.reference import dense_ssm_reference
from linrec.ops.dense_ssm.torch import convolution, recurrence
from linrec.ops.dispatch import SHORT, Pair, exporting, resolve
from linrec.ops.precision import accumulation, without_autocast

__all__ = ["PAIRS", "dense_ssm"]

_RUN: dict[Pair, Callable[..., tuple[Tensor, Tensor]]] = {
    ("recurrent", "reference"): dense_ssm_reference,
    ("recurrent", "torch"): recurrence,
    ("convolution", "torch"): convolution,
}
PAIRS: tuple[Pair, ...] = tuple(_RUN)


def dense_ssm(
    u: Float[Tensor, "b t d"],
    A: Float[Tensor, "*d n n"],
    B: Float[Tensor, "*d n"],
    C: Float[Tensor, "*d m n"] | None = None,
    *,
    state: Float[Tensor, "b d n"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t d m"], Float[Tensor, "b d n"]]:
    """Run a linear state-space model for every channel, with whole matrices.

        x_t = A x_{t-1} + B u_t    y_t = C x_t

    Nothing depends on time, so the model is also m convolutions: y_i = K_i * u with K_il = C_i A^l B, to
    which the initial state adds its response C A^(t+1) x_0. Where A is diagonal, `linrec.ops.diagonal_ssm`
    has far less to do.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | recurrent | torch | a loop over time for the states alone |
    | convolution | torch | `linrec.ops.long_conv` with K; no states but the last are formed |

    `"auto"` takes the loop for at most 16 steps, else the convolution. K is made from about sqrt(t) powers of
    A on B and as many on C, which are formed by squaring A in double precision; `backend` is handed on to
    `long_conv`, which chooses for itself with "auto".

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        A: (d, n, n), or (n, n) for all channels. Nothing limits its eigenvalues; those above 1 grow
            exponentially.
        B: (d, n), or (n,) for all channels.
        C: m outputs per channel (d, m, n), or (m, n) for all; None is the state itself, y_t = x_t, m = n. All
            three are in the precision of sums: float32, or float64 beside double inputs.
        state: x before the first step (b, d, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch" or "reference".

    Returns:
        y (b, t, d, m) in the dtype of `u`, and x after the last step, in the precision of sums.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes or devices that do not fit together; an unknown (mode, backend).

    Source:
        Gu and others, LSSL (2021), section 3: the recurrent and the convolutional view.

    Example:
        Running sums, and sums of those:

        >>> import torch
        >>> A, B = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([1.0, 1.0])
        >>> y, state = dense_ssm(torch.ones(1, 3, 1), A, B)
        >>> y[0, :, 0].tolist(), state[0, 0].tolist()
        ([[1.0, 1.0], [2.0, 3.0], [3.0, 6.0]], [3.0, 6.0])
    """
    check(u, A, B, C, state, reset)
    # one program serves all lengths from 2 on: a comparison with any other number would limit them
    few = u.shape[1] <= 1 or (not exporting() and u.shape[1] <= SHORT)
    best: Pair = ("recurrent" if few else "convolution", "torch")
    pair = resolve("dense_ssm", PAIRS, mode, backend, [best])
    refuse_split_time("dense_ssm")
    A, B, C = canonical(A, B, C)
    sums = accumulation(u.dtype)
    batch, time, channels = u.shape
    x = u.new_zeros(batch, channels, B.shape[-1], dtype=sums) if state is None else state.to(sums)
    if u.numel() == 0:
        return u.new_zeros(batch, time, channels, C.shape[-2]), x.clone()
    with without_autocast(u.device.type):
        if pair[0] == "convolution":
            # it leaves out what an initial state of zeros would add
            y, last = _RUN[pair](u.to(sums), A, B, C, None if state is None else x, reset, backend)
        else:
            y, last = _RUN[pair](u.to(sums), A, B, C, x, reset)
    return y.to(u.dtype), last
