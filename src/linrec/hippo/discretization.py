"""Discretisation of dense state-space systems."""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from linrec.errors import StepSizeError
from linrec.hippo.measures import StateSpace
from linrec.ops.core.checks import are_tensors, visible
from linrec.rules import choice, positive, typed

__all__ = ["Discretization", "discretize"]

Discretization: TypeAlias = Literal["zoh", "bilinear", "euler"]


def discretize(
    system: StateSpace, step: Float[Tensor, "*steps"] | float, method: Discretization = "zoh"
) -> StateSpace:
    """Return the discrete x_k = Abar x_{k-1} + Bbar u_k of x' = A x + B u, for steps of size h.

    | method | Abar | Bbar |
    |---|---|---|
    | "zoh" | exp(h A) | int_0^h exp(s A) ds B: exact for an input that is constant during each step |
    | "bilinear" | (I - h A / 2)^-1 (I + h A / 2) | (I - h A / 2)^-1 h B |
    | "euler" | I + h A | h B: the forward Euler method |

    "zoh" and "bilinear" keep a stable system stable for any h; "euler" needs |1 + h lambda| < 1 for all
    eigenvalues lambda of A. A may be singular.

    Args:
        system: A (..., N, N) and B (..., N).
        step: h > 0 in the system's unit of time, a number or a tensor whose shape broadcasts with the leading
            axes of the system.
        method: "zoh", "bilinear" or "euler".

    Returns:
        Abar (..., N, N) and Bbar (..., N), differentiable in A, B and h. They are computed in float32 or
        wider, and the exponential in float64.

    Raises:
        ValueError: the method is unknown, or h is not positive.

    Source:
        HiPPO (Gu and others, 2020), appendix on discretisation; LSSL (Gu and others, 2021) for "bilinear".
        The input of "euler" is that of the new step, as in Tiezzi and others, State-Space Modeling in Long
        Sequence Processing (2024), equation 43.

    Example:
        >>> import torch
        >>> A, B = discretize(StateSpace(torch.tensor([[-1.0]]), torch.tensor([2.0])), 0.5, "bilinear")
        >>> A.tolist(), B.tolist()
        ([[0.6000000238418579]], [0.800000011920929])
    """
    A, B = system if isinstance(system, tuple) and len(system) == 2 else (system, None)
    are_tensors(A=A, B=B)
    choice(Discretization, method=method)
    if not isinstance(step, Tensor):
        typed({"step": float}, step=step)
        positive(step=step, cure="A step of zero never moves.")
        step = A.new_tensor(step)
    elif step.numel() and visible(step) and not (least := float(step.detach().min())) > 0:
        raise StepSizeError(
            f"`step` must be positive times; got values down to {least:.4g}. A step of zero never moves."
        )
    # half precision is not accurate enough for solve and matrix_exp
    dtype = torch.promote_types(step.dtype, A.dtype)
    A, B, step = (x.to(torch.promote_types(dtype, torch.float32)) for x in (A, B, step))
    A, B = step[..., None, None] * A, step[..., None] * B
    if method == "euler":
        A = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        return StateSpace(A.to(dtype), B.expand(A.shape[:-1]).to(dtype))
    B = B[..., None].expand(*A.shape[:-1], 1)
    if method == "bilinear":
        identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        # solve_ex skips the check that waits for a GPU: for stable A, I - A / 2 has eigenvalues of at least 1
        both, _ = torch.linalg.solve_ex(identity - A / 2, torch.cat([identity + A / 2, B], -1))
    else:
        # the input becomes an additional, constant coordinate, so A need not be inverted
        rows = functional.pad(torch.cat([A, B], -1), (0, 0, 0, 1))
        # matrix_exp halves the norm until it is small, then squares as often; each squaring doubles the error
        wide = rows.dtype if rows.device.type == "mps" else torch.float64
        both = torch.linalg.matrix_exp(rows.to(wide))[..., :-1, :]
    both = both.to(dtype)
    return StateSpace(both[..., :-1], both[..., -1])
