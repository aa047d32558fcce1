"""What the wrappers have in common that run mixers over one input in several directions."""

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

    A subclass says what the directions are. It is a `Mixer`, so that a `Block` takes it, but every output
    depends on the whole input: it has no state, and cannot stream.

    Directions that share all parameters, added up, see no difference between an input and its mirror image:
    the outputs of the one are the mirrored outputs of the other. Let each keep a parameter of its own.

    Args:
        mixers: one mixer for each direction, of one class and width; or a single one, which then runs in
            all of them with the same parameters.
        directions: their names.
        combine: "sum", "mean", or "concatenate" with a Linear from n d_model to d_model.
        unshared: None leaves the mixers as they are. Names make them share the first one's parameters, but
            for those named, such as ("theta",) of HGRU; () shares all.

    Raises:
        ValueError: mixers that are neither one nor one per direction, or that differ in class or width; no
            such way to combine; no such parameter, or a single mixer with `unshared`.
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
                f"one for all; got {len(mixers)}."
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
        # with nothing of its own, a further mixer would be the first one under a second name
        self.mixers = nn.ModuleList(mixers[:1] if self.unshared == () else mixers)
        self._tie()
        width = len(directions) * d_model
        self.project = nn.Linear(width, d_model) if combine == "concatenate" else None

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> None:
        """None: there is no state."""

    @property
    def state_size(self) -> int:
        """0: there is no state."""
        return 0

    @classmethod
    def share(cls, layers: "Sequence[Directions]") -> None:
        """Let the mixers of each direction share what their class shares, as a stack of their own.

        For HGRU that is one set of lower bounds per direction, or a single one where directions share
        parameters.
        """
        for stack in zip(*(layer.mixers for layer in layers), strict=True):
            type(stack[0]).share(stack)
        for layer in layers:
            layer._tie()

    def place(self, layer: int, n_layers: int) -> None:
        """Let the mixer of every direction start as that layer."""
        for mixer in cast(list[Mixer], [*self.mixers]):
            mixer.place(layer, n_layers)

    def _runs(self, state: State) -> list[Mixer]:
        """Return the mixers of all directions; refuse a state."""
        if state is not None:
            raise ValueError(
                f"`state` must be None for {type(self).__name__}; got {type(state).__name__}. Its outputs "
                "depend on later steps, so an input cannot be continued: pass the whole of it at once."
            )
        refuse_split_time(type(self).__name__)
        return cast(list[Mixer], [*self.mixers]) * (len(self.directions) // len(self.mixers))

    def _tie(self) -> None:
        """Give all mixers the parameters of the first, but for those that are not shared."""
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
