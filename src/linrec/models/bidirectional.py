"""Any mixer over a sequence in both directions, for encoders."""

from collections.abc import Sequence

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

    HGRN's paper does not say how its encoders look both ways. In the authors' code the directions share all
    but the phase, `unshared=("theta",)`, and their states are added before the norm and the output gate. A
    wrapper of any mixer sees outputs, and adds those; the parameters are as many.

    With one mixer for both directions, `Bidirectional(mixer)`, and a sum or a mean, nothing tells the past
    from the future: the reversed sequence has the reversed outputs, and the same mean.

    S4 and S5 add their directions before GELU, and the directions share all parameters but C. Both layers
    are `Bidirectional` of mixers with `activation=False, output="none"`, with GELU and the rest behind it;
    S5 has `unshared=("C", "D")`. The released kernel of S4 against time starts at the next step, which
    another C and D of that direction express.

    `reset` cuts the same links in both directions: nothing passes between steps t-1 and t where it is true
    at t. There is no state, since the first output depends on the last step.

    Args:
        forwards: the mixer f.
        backwards: the mixer g, of the same class and width; None runs f itself in both directions.
        combine: "sum", "mean" or "concatenate".
        unshared: None, or names of the parameters that `backwards` keeps; its others become those of
            `forwards`.

    Raises:
        ValueError: mixers of two classes or widths, no such way to combine, or no such parameter.

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

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], None]:
        """Mix `x` over time, in both directions.

        Args:
            x: (b, t, d_model).
            state: None.
            reset: (b, t) bool, true where a new sequence starts, be it a document or the padding behind one.

        Returns:
            y (b, t, d_model), and None.

        Raises:
            ValueError: a `state` is given.
        """
        self.check_input(x, reset)
        forwards, backwards = self._runs(state)
        ahead, _ = forwards(x, reset=reset)
        # step t is step n-1-t of the reversed sequence, so the link from t-1 to t ends at n-t there
        cut = None if reset is None else reset.flip(1).roll(1, dims=1)
        back, _ = backwards(x.flip(1), reset=cut)
        return self._combined([ahead, back.flip(1)]), None
