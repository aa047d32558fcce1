"""Any mixer over a sequence in both directions, for encoders."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.mixers import Mixer, State
from linrec.models.directions import Combine, Directions

__all__ = ["Bidirectional"]


class Bidirectional(Directions):
    """y_t = f(x_1, ..., x_t) + g(x_n, ..., x_t): a mixer f in time, and a mixer g against it.

    | `combine`     | y                                             |
    |---------------|-----------------------------------------------|
    | "sum"         | f + g, as in HGRN                             |
    | "mean"        | (f + g) / 2                                   |
    | "concatenate" | W [f, g] + b                                  |

    HGRN's paper does not describe its bidirectional encoder. In the authors' code the two directions share
    every parameter except the phase, `unshared=("theta",)`. That code adds the states of the two directions
    before the norm and the output gate; this wrapper works for any mixer, so it adds the outputs. The number
    of parameters is equal.

    `Bidirectional(mixer)` with a sum or a mean uses one mixer in both directions. It cannot tell past from
    future: a reversed input gives the reversed output, and the same mean over time.

    S4 and S5 add their directions before GELU, and the directions share every parameter except C. To
    reproduce both layers, wrap mixers with `activation=False, output="none"`, and put GELU and the rest of
    the layer after the wrapper; S5 needs `unshared=("C", "D")`. In the released code of S4, the kernel of the
    backward direction starts at the next step. The same map results from another C and D of that direction.

    `reset` cuts the same links in both directions: nothing passes between steps t-1 and t if `reset` is true
    at t. There is no state, because the first output depends on the last step.

    Args:
        forwards: the mixer f.
        backwards: the mixer g, of the same class and width; None uses f in both directions.
        combine: "sum", "mean" or "concatenate".
        unshared: None, or names of the parameters that `backwards` keeps as its own; it shares all others
            with `forwards`.

    Raises:
        ValueError: mixers of different classes or widths, an unknown `combine`, or an unknown parameter.

    Source:
        Schuster and Paliwal, Bidirectional Recurrent Neural Networks (1997); HGRN (Qin, Yang and Zhong,
        2023), section 4.1, and the authors' code; the released code of S4 (Gu, Goel and Ré, 2022) and S5
        (Smith, Warrington and Linderman, 2023).

    Example:
        >>> import torch
        >>> from linrec.mixers import build
        >>> mixer = Bidirectional(build("hgru", 8), build("hgru", 8))
        >>> y, _ = mixer(torch.zeros(2, 5, 8))
        >>> y.shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        forwards: Mixer,
        backwards: Mixer | None = None,
        *,
        combine: Combine = "sum",
        unshared: Sequence[str] | None = None,
    ) -> None:
        mixers = [forwards] if backwards is None else [forwards, backwards]
        super().__init__(mixers, ("forward", "backward"), combine, unshared)
        self.takes_dt = forwards.takes_dt

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], None]:
        """Mix `x` over time, in both directions.

        Args:
            x: (b, t, d_model).
            state: None.
            reset: (b, t) bool, true where a new sequence starts: a packed document, or the padding after it.
            dt: (b, t), the time since the step before; for mixers with `takes_dt`. Against time, the last
                step of a sequence comes first, and its time is 1.

        Returns:
            y (b, t, d_model), and None.

        Raises:
            ValueError: `state` is not None.
        """
        self.check_input(x, reset)
        forwards, backwards = self._runs(state)
        # step t of x is step n-1-t of the reversed x, so the link from t-1 to t ends at step n-t there
        cut = None if reset is None else reset.flip(1).roll(1, dims=1)
        ahead, _ = forwards(x, reset=reset, **({} if dt is None else {"dt": dt}))
        back, _ = backwards(x.flip(1), reset=cut, **({} if dt is None else {"dt": _against(dt, cut)}))
        return self._combined([ahead, back.flip(1)]), None


def _against(dt: Tensor, cut: Tensor | None) -> Tensor:
    """Return the times of the reversed steps, 1 where a sequence starts in reversed time."""
    dt = dt.flip(1).roll(1, dims=1)
    start = torch.zeros_like(dt, dtype=torch.bool) if cut is None else cut.clone()
    start[:, :1] = True
    return dt.masked_fill(start, 1)
