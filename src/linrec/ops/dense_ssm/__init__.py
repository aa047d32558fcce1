"""Time-invariant state-space models with dense matrices: as a convolution and as a recurrence."""

from jaxtyping import Bool, Float
from torch import Tensor, dtype

from linrec.ops.core.call import documented
from linrec.ops.core.checks import check_factors
from linrec.ops.core.stationary import backends, model
from linrec.ops.dense_ssm.reference import dense_ssm_reference
from linrec.ops.dense_ssm.torch import DenseSSM, convolution, recurrence

__all__ = ["OPERATOR", "dense_ssm"]


def _canonical(given: DenseSSM) -> DenseSSM:
    """Check shapes and dtypes, and add a channel axis to shared matrices."""
    matrices = {"A": given.A, "B": given.B} | ({} if given.C is None else {"C": given.C})
    check_factors(given.u, matrices, ("real",))
    channels, n = given.u.shape[2], given.A.shape[-1] if given.A.ndim else 0
    outputs = 1 if given.C is None or given.C.ndim < 2 else given.C.shape[-2]
    for (name, x), shape in zip(matrices.items(), ((n, n), (n,), (outputs, n)), strict=False):
        each = (channels, *shape)
        if x.shape not in (shape, each):
            expected = f"{shape}, or {each} with a matrix for each channel of `u`"
            raise ValueError(f"`{name}` must have shape {expected}; got {tuple(x.shape)}.")
        x = x[None] if x.shape == shape else x
        # if A differs between channels, so do its products with the other matrices
        shared = name == "A" or len(matrices["A"]) == 1
        matrices[name] = x if shared else x.expand(len(matrices["A"]), *shape)
    return given._replace(**matrices)


def _output(given: DenseSSM) -> tuple[tuple[int, ...], dtype]:
    outputs = given.B.shape[-1] if given.C is None else given.C.shape[-2]
    return (*given.u.shape, outputs), given.u.dtype


OPERATOR = model(
    "dense_ssm",
    DenseSSM,
    canonical=_canonical,
    output=_output,
    state=lambda given: ((given.u.shape[0], given.u.shape[2], given.B.shape[-1]), given.B.dtype),
    backends=backends(recurrence, convolution, dense_ssm_reference),
    is_empty=lambda given: given.B.shape[-1] == 0,
)
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
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
    """Run a linear state-space model with dense matrices for every channel.

        x_t = A x_{t-1} + B u_t    y_t = C x_t

    The model is time-invariant, so it is also m convolutions: y_i = K_i * u with K_il = C_i A^l B, plus the
    response C A^(t+1) x_0 of the initial state. For diagonal A, `linrec.ops.diagonal_ssm` is far faster.

    {backends}

    `"auto"` uses the loop for at most 16 steps, else the convolution. K is computed from about sqrt(t) powers
    of A times B, and equally many times C. The powers come from repeated squaring of A in double precision,
    by torch on every device; `backend` selects the convolution.

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        A: (d, n, n), or (n, n) for all channels. Eigenvalues are not restricted; values above 1 in magnitude
            grow exponentially.
        B: (d, n), or (n,) for all channels.
        C: m outputs per channel (d, m, n), or (m, n) for all channels; None outputs the state, y_t = x_t and
            m = n. A, B and C are in the accumulation dtype: float32, or float64 for double inputs.
        state: initial x (b, d, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch", "triton" or "reference".

    Returns:
        y (b, t, d, m) in the dtype of `u`, and x after the last step, in the accumulation dtype.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices do not match; (mode, backend) is unknown or cannot run here.

    Source:
        Gu and others, LSSL (2021), section 3: the recurrent and the convolutional view.

    Example:
        Running sums, and their running sums:

        >>> import torch
        >>> A, B = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([1.0, 1.0])
        >>> y, state = dense_ssm(torch.ones(1, 3, 1), A, B)
        >>> y[0, :, 0].tolist(), state[0, 0].tolist()
        ([[1.0, 1.0], [2.0, 3.0], [3.0, 6.0]], [3.0, 6.0])
    """
    return OPERATOR(DenseSSM(u, A, B, C, state, reset), mode, backend)
