"""Time-invariant state-space models, diagonal plus low rank: as a convolution and as a recurrence."""

from jaxtyping import Bool, Complex, Float, Inexact
from torch import Tensor

from linrec.ops.core.call import documented
from linrec.ops.core.checks import check_factors, check_shape
from linrec.ops.core.stationary import backends, model
from linrec.ops.dplr_ssm.reference import dplr_ssm_reference
from linrec.ops.dplr_ssm.torch import DPLRSSM, convolution, recurrence

__all__ = ["OPERATOR", "dplr_ssm"]


def _canonical(given: DPLRSSM) -> DPLRSSM:
    """Check shapes and dtypes."""
    u, a, p, q, b, c, _, _ = given
    check_factors(u, {"a": a, "p": p, "q": q, "b": b, "c": c}, ("complex",))
    check_shape("a", a, "(d, n)", (u.shape[2], "n"), "Pass n transitions for each channel of `u`.")
    check_shape("p", p, "(d, n, r)", (*a.shape, "r"), "Pass the rank's factors as columns.")
    if 0 in (a.shape[1], p.shape[2]):
        got = f"`a` and `p` must have n and r of at least 1; got {tuple(a.shape)} and {tuple(p.shape)}. "
        raise ValueError(f"{got}For rank 0, use `diagonal_ssm`.")
    check_shape("q", q, "(d, n, r)", p.shape, "Give it the shape of `p`.")
    for name, x in (("b", b), ("c", c)):
        check_shape(name, x, "(d, n)", a.shape, "Give it the shape of `a`.")
    return given


_BACKENDS = backends(recurrence, convolution, dplr_ssm_reference)
OPERATOR = model("dplr_ssm", DPLRSSM, canonical=_canonical, backends=_BACKENDS)
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
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
    """Run a linear state-space model with a diagonal plus low-rank matrix for every channel.

        x_t = a * x_{t-1} - p Re(q^T x_{t-1}) + b u_t    y_t = Re(sum_n c_n x_tn)

    If the transition changes at every step, use `linrec.ops.generalized_delta_rule`.

    If an entry of the state represents a conjugate pair, pass 2 q and 2 c. The model is time-invariant, so it
    is also a convolution, plus the response of the initial state. Without p and q, it is
    `linrec.ops.diagonal_ssm`; with a dense matrix, `linrec.ops.dense_ssm`.

    {backends}

    `"auto"` uses the loop for at most 16 steps, else the convolution. Its taps are the taps of (1 + r)^2
    diagonal models, combined by Woodbury's identity for power series truncated to the length of the sequence.
    So they are exact for any number of steps, without a high power of the matrix. Taps are computed in double
    precision, by torch on every device; `backend` selects the convolution.

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        a: diagonal (d, n), complex.
        p: left factors of the low-rank part (d, n, r), r at least 1.
        q: right factors of the low-rank part (d, n, r).
        b: input weights (d, n).
        c: output weights (d, n). All five factors are complex64, or complex128 for double inputs. Eigenvalues
            of diag(a) - p q^T and magnitudes of a are not restricted, but above 1 they grow exponentially.
        state: initial x (b, d, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch", "triton" or "reference".

    Returns:
        y (b, t, d) in the dtype of `u`, and x after the last step, complex64 or complex128.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices do not match; (mode, backend) is unknown or cannot run here.

    Source:
        S4 (Gu, Goel and Ré, 2022): the recurrence after the bilinear transform, and Woodbury's identity for
        its generating function, here as a power series instead of values at the roots of unity.

    Example:
        A state that cancels itself by feedback after a step:

        >>> import torch
        >>> one = torch.ones(1, 1, dtype=torch.complex64)
        >>> y, state = dplr_ssm(torch.ones(1, 3, 1), one, one[..., None], one[..., None], one, one)
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 1.0, 1.0], [[[(1+0j)]]])
    """
    return OPERATOR(DPLRSSM(u, a, p, q, b, c, state, reset), mode, backend)
