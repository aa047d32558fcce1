"""Base class of the wrappers that run mixers over one input in several directions."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.mixers import Mixer, State
from linrec.ops.core.call import refuse_split_time

__all__ = ["Combine", "Directions"]

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

    Raises:
        ValueError: the number of mixers is neither 1 nor the number of directions, mixers differ in class or
            width, `combine` or a parameter is unknown, or `unshared` is given with a single mixer.
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
        self.own_norm = mixers[0].own_norm
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
            type(stack[0]).share(stack)
        for layer in layers:
            layer._tie()

    def place(self, layer: int, n_layers: int) -> None:
        """Set the initial values of all directions' mixers for a layer's depth; see `Mixer.place`."""
        for mixer in cast(list[Mixer], [*self.mixers]):
            mixer.place(layer, n_layers)

    def _runs(self, state: State) -> list[Mixer]:
        """Return the mixers of all directions; raise if a state is given."""
        if state is not None:
            raise ValueError(
                f"`state` must be None for {type(self).__name__}; got {type(state).__name__}. Its outputs "
                "depend on later steps, so an input cannot be continued: pass the whole of it at once."
            )
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
