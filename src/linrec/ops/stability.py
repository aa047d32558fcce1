"""Checks of values that would make states grow, where looking costs no waiting and breaks no graph."""

from torch import Tensor

from linrec.ops.visibility import visible


def check_rates(name: str, A: Tensor) -> None:
    """Raise where an entry of x' = A x, A diagonal, would grow."""
    if A.numel() and visible(A) and (largest := float(A.detach().real.max())) > 0:
        be = "have real parts of" if A.is_complex() else "be"
        raise ValueError(
            f"`{name}` must {be} at most 0, or states grow without bounds; got values up to {largest:.4g}. "
            f"Pass `-torch.exp({name}_log)`{' as real parts' if A.is_complex() else ''}."
        )


def check_steps(name: str, dt: Tensor) -> None:
    """Raise where a step would go back in time; one of zero leaves a state as it is."""
    if dt.numel() and visible(dt) and (smallest := float(dt.detach().min())) < 0:
        raise ValueError(
            f"`{name}` must be at least 0; got values down to {smallest:.4g}. Pass `softplus(...)` of them."
        )
