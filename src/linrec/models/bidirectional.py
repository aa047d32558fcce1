"""Mixers over one input in several directions, for encoders; over a sequence, in both."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.mixers import Mixer, State
from linrec.nn.documents import turned_round
from linrec.ops.core.call import refuse_split_time

__all__ = ["Bidirectional", "Combine", "Directions"]

Combine: TypeAlias = Literal["sum", "mean", "concatenate"]


class Directions(Mixer):
    """y = y_1 + ... + y_n, with y_i the output of a mixer that runs in direction i.

    | `combine`     | y                               |
    |---------------|---------------------------------|
    | "sum"         | y_1 + ... + y_n                 |
    | "mean"        | (y_1 + ... + y_n) / n           |
    | "concatenate" | W [y_1, ..., y_n] + b           |

    A subclass defines the directions. It is a `Mixer`, so that a `Block` accepts it. But every output depends
    on the whole input, so it has no state and cannot stream.

    If the directions share all parameters and their outputs are added, the layer cannot tell an input from
    its mirror image: a mirrored input gives the mirrored output. To avoid this, leave a parameter unshared.

    Args:
        mixers: one mixer per direction, all of one class and width; or a single mixer, which runs in all
            directions with the same parameters.
        directions: names of the directions.
        combine: "sum", "mean", or "concatenate" with a Linear from n d_model to d_model.
        unshared: None leaves the mixers as they are. Otherwise all mixers share the first mixer's parameters,
            except the parameters named here, such as ("theta",) of HGRU; () shares all parameters.
    """

    def __init__(
        self,
        mixers: Sequence[Mixer],
        directions: Sequence[str],
        combine: Combine,
        unshared: Sequence[str] | None,
    ) -> None:
        if len(mixers) not in (1, len(directions)):
            raise ValueError(
                f"`mixers` must be {len(directions)}, one for each of {', '.join(directions)}, or a single "
                f"mixer for all; got {len(mixers)}."
            )
        of = {(type(mixer).__name__, mixer.d_model) for mixer in mixers}
        if len(of) != 1:
            raise ValueError(
                f"`mixers` must have one class and one `d_model`; got {sorted(of)}. "
                "Build them with the same name and width."
            )
        if combine not in ("sum", "mean", "concatenate"):
            raise unknown("`combine`", combine, ["sum", "mean", "concatenate"])
        if unshared is not None and len(mixers) != len(directions):
            raise ValueError(
                f"`unshared` needs a mixer for each of {', '.join(directions)}; got {len(mixers)}. "
                "Leave it out: a single mixer shares everything."
            )
        d_model = mixers[0].d_model
        super().__init__(d_model)
        self.own_norm, self.own_dropout = mixers[0].own_norm, mixers[0].own_dropout
        self.directions, self.combine = tuple(directions), combine
        self.unshared = None if unshared is None else tuple(unshared)
        # if all parameters are shared, further mixers would only be aliases of the first
        self.mixers = nn.ModuleList(mixers[:1] if self.unshared == () else mixers)
        self._tie()
        width = len(directions) * d_model
        self.project = nn.Linear(width, d_model) if combine == "concatenate" else None

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> None:
        """Return None: there is no state."""

    @property
    def is_causal(self) -> bool:
        """False: every output depends on the whole input."""
        return False

    @classmethod
    def share(cls, layers: "Sequence[Directions]") -> None:
        """Share parameters among the layers of a stack, separately for each direction; see `Mixer.share`.

        For HGRU these are the lower bounds: one set per direction, or a single set if the directions share
        all parameters.
        """
        for stack in zip(*(layer.mixers for layer in layers), strict=True):
            # values would come from both directions
            if not stack[0].takes_values:
                type(stack[0]).share(stack)
        for layer in layers:
            layer._tie()

    def place(self, layer: int, n_layers: int) -> None:
        """Set the initial values of all directions' mixers for a layer's depth; see `Mixer.place`."""
        for mixer in cast(list[Mixer], [*self.mixers]):
            mixer.place(layer, n_layers)

    def _runs(self, state: State) -> list[Mixer]:
        """Return the mixers of all directions; raise if a state is given."""
        self.check_causal(state)
        refuse_split_time(type(self).__name__)
        return cast(list[Mixer], [*self.mixers]) * (len(self.directions) // len(self.mixers))

    def _tie(self) -> None:
        """Make all mixers share the parameters of the first, except the unshared parameters."""
        if self.unshared is None:
            return
        first, *others = self.mixers
        parameters = dict(first.named_parameters())
        known = dict.fromkeys(path.split(".")[0] for path in parameters)
        for name in self.unshared:
            if name not in known:
                raise unknown(f"parameter of {type(first).__name__} called", name, known)
        for path, parameter in parameters.items():
            if path.split(".")[0] not in self.unshared:
                owner, _, name = path.rpartition(".")
                for other in others:
                    setattr(other.get_submodule(owner), name, parameter)

    def _combined(self, outputs: Sequence[Tensor]) -> Tensor:
        if self.project is not None:
            return self.project(torch.cat(tuple(outputs), -1))
        total = sum(outputs[1:], outputs[0])
        return total / len(outputs) if self.combine == "mean" else total


class Bidirectional(Directions):
    """y_t = f(x_1, ..., x_t) + g(x_n, ..., x_t): a mixer f in time, and a mixer g against time.

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
    at t. Each sequence is reversed in its place, so that the segments of a mixer with segments start at the
    last step of the first sequence, whatever follows it. There is no state, because the first output depends
    on the last step.

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
        ahead, _ = forwards(x, reset=reset, **({} if dt is None else {"dt": dt}))
        times = {} if dt is None else {"dt": _against(dt, reset)}
        back, _ = backwards(turned_round(x, reset), reset=reset, **times)
        return self._combined([ahead, turned_round(back, reset)]), None


def _against(dt: Tensor, reset: Tensor | None) -> Tensor:
    """Return the times of the reversed steps, 1 where a sequence starts in reversed time."""
    start = torch.zeros_like(dt, dtype=torch.bool) if reset is None else reset.clone()
    start[:, :1] = True
    return turned_round(dt, reset).roll(1, dims=1).masked_fill(start, 1)
