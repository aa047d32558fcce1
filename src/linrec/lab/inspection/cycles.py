"""Fixed points and cycles of piecewise linear networks, found by their regions of linearity (SCYFI).

    z_{t+1} = (A + W D(z_t)) z_t + h,    D(z) = diag(1[z > 0])

In a sequence of regions D_1 .. D_k the map is linear, so its cycle is one linear solve. If the cycle does not
lie in the regions that it was solved for, the search goes on with the regions that it does lie in.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.rules import at_least, require

__all__ = ["Cycle", "find_cycles"]


class Cycle(NamedTuple):
    """A cycle of k steps; a fixed point for k = 1.

    Args:
        states: (k, n), from the state with the largest first entry on.
        eigenvalues: of the product of the k Jacobians, (n,) complex. The cycle attracts if all are below 1 in
            absolute value.
    """

    states: Float[Tensor, "k n"]
    eigenvalues: Tensor

    @property
    def is_stable(self) -> bool:
        """Whether the cycle attracts."""
        return bool((self.eigenvalues.abs() < 1).all())


def find_cycles(
    A: Float[Tensor, "n"],
    W: Float[Tensor, "n n"],
    h: Float[Tensor, "n"],
    order: int,
    *,
    starts: int = 100,
    steps: int = 200,
    seed: int = 0,
) -> list[Cycle]:
    """Return the cycles of `order` steps of z' = (diag(A) + W D(z)) z + h that the search finds.

    Args:
        A: (n,), the linear part.
        W: (n, n), weights of the rectified state.
        h: (n,), the bias.
        order: number of steps k; cycles of a divisor of k steps are left out.
        starts: number of random sequences of regions, more for higher orders and dimensions.
        steps: most repetitions from each.
        seed: seed of the random regions.

    Raises:
        ValueError: the shapes do not agree, or a number is below 1.

    Source:
        Eisenmann, Monfared, Goring and Durstewitz, Bifurcations and Loss Jumps in RNN Training (2023),
        algorithm 1.

    Example:
        >>> A, W = torch.tensor([0.5]), torch.zeros(1, 1)
        >>> [cycle.states.tolist() for cycle in find_cycles(A, W, torch.ones(1), 1)]
        [[[2.0]]]
    """
    at_least(1, order=order, starts=starts, steps=steps)
    n = len(A)
    require(
        A.shape == h.shape == (n,) and W.shape == (n, n),
        "`A`, `W` and `h` must have shapes (n,), (n, n) and (n,); got "
        f"{tuple(A.shape)}, {tuple(W.shape)} and {tuple(h.shape)}.",
    )
    draw, found = torch.Generator().manual_seed(seed), list[Cycle]()
    for _ in range(starts):
        regions = torch.rand(order, n, generator=draw) < 0.5
        tried: set[bytes] = set()
        for _ in range(steps):
            key = regions.numpy().tobytes()
            # the search repeats from here on
            if key in tried:
                break
            tried.add(key)
            P, states = _solved(A, W, h, regions)
            if states is None:
                break
            if torch.equal(states > 0, regions):
                _add(found, states, P)
                break
            regions = states > 0
    return found


def _solved(A: Tensor, W: Tensor, h: Tensor, regions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the product of Jacobians in the given regions, and the cycle there; None if it is not unique."""
    n = len(A)
    P, s = torch.eye(n, dtype=A.dtype), torch.zeros_like(h)
    for region in regions:
        J = A.diag() + W * region
        # P z + s is the state after the steps so far
        P, s = J @ P, J @ s + h
    z, failed = torch.linalg.solve_ex(torch.eye(n, dtype=A.dtype) - P, s)
    if failed or not z.isfinite().all():
        return P, None
    states = [z]
    for _ in regions[1:]:
        z = A * z + W @ z.relu() + h
        states.append(z)
    return P, torch.stack(states)


def _add(found: list[Cycle], states: Tensor, P: Tensor) -> None:
    """Add a cycle unless it is there already, or repeats a shorter one."""
    scale = 1e-6 * (1 + states.abs().max())
    order = len(states)
    if any((states - states.roll(k, 0)).abs().max() < scale for k in range(1, order)):
        return
    states = states.roll(-int(states[:, 0].argmax()), 0)
    if not any((states - other.states).abs().max() < scale for other in found):
        found.append(Cycle(states, torch.linalg.eigvals(P)))
