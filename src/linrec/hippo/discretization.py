"""Dense state-space systems from continuous to discrete time."""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from linrec.errors import StepSizeError, unknown
from linrec.hippo.measures import StateSpace
from linrec.ops.core.checks import visible

__all__ = ["Discretization", "discretize"]

Discretization: TypeAlias = Literal["zoh", "bilinear"]


def discretize(
    system: StateSpace, step: Float[Tensor, "*steps"] | float, method: Discretization = "zoh"
) -> StateSpace:
    """x_k = Abar x_{k-1} + Bbar u_k from x' = A x + B u, by steps of a size h.

    | method | Abar | Bbar |
    |---|---|---|
    | "zoh" | exp(h A) | int_0^h exp(s A) ds B: exact for an input that is held during the step |
    | "bilinear" | (I - h A / 2)^-1 (I + h A / 2) | (I - h A / 2)^-1 h B |

    Both keep a stable system stable with any step, and A may be singular.

    Args:
        system: A (..., N, N) and B (..., N).
        step: h > 0 in the system's unit of time, a number or a tensor whose shape broadcasts with the leading
            axes of the system.
        method: "zoh" or "bilinear".

    Returns:
        Abar (..., N, N) and Bbar (..., N), differentiable in all that is given; computed in float32 at least,
        and the exponential in float64.

    Raises:
        ValueError: an unknown method, or a number h that is not positive.

    Source:
        HiPPO (Gu and others, 2020), appendix on discretisation; LSSL (Gu and others, 2021) for the second.

    Example:
        >>> import torch
        >>> A, B = discretize(StateSpace(torch.tensor([[-1.0]]), torch.tensor([2.0])), 0.5, "bilinear")
        >>> A.tolist(), B.tolist()
        ([[0.6000000238418579]], [0.800000011920929])
    """
    A, B = system
    if method not in ("zoh", "bilinear"):
        raise unknown("discretization", method, ["zoh", "bilinear"])
    if not isinstance(step, Tensor):
        if not step > 0:
            raise ValueError(f"`step` must be a positive time; got {step}. A step of zero never moves.")
        step = A.new_tensor(step)
    elif step.numel() and visible(step) and not (least := float(step.detach().min())) > 0:
        raise StepSizeError(
            f"`step` must be positive times; got values down to {least:.4g}. A step of zero never moves."
        )
    # neither function below is right in half precision
    dtype = torch.promote_types(step.dtype, A.dtype)
    A, B, step = (x.to(torch.promote_types(dtype, torch.float32)) for x in (A, B, step))
    A, B = step[..., None, None] * A, step[..., None] * B
    B = B[..., None].expand(*A.shape[:-1], 1)
    if method == "bilinear":
        identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        # without the check that waits for a GPU: of a stable A, the eigenvalues on the left are 1 at least
        both, _ = torch.linalg.solve_ex(identity - A / 2, torch.cat([identity + A / 2, B], -1))
    else:
        # the input is one more coordinate, which does not change; so A needs no inverse
        rows = functional.pad(torch.cat([A, B], -1), (0, 0, 0, 1))
        # it is squared as often as its norm is halved until it is small, with an error that doubles each time
        wide = rows.dtype if rows.device.type == "mps" else torch.float64
        both = torch.linalg.matrix_exp(rows.to(wide))[..., :-1, :]
    both = both.to(dtype)
    return StateSpace(both[..., :-1], both[..., -1])
