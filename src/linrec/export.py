"""Mixers for `torch.export`: plain tuples replace the mixers' own state types."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.mixer import Mixer

__all__ = ["Exportable"]


class Exportable(nn.Module):
    """A mixer whose states are tensors and plain tuples of tensors, for programs that run without linrec.

    A program of `torch.export` returns the types that the module returns. Many mixers return a named tuple
    type of their own. `torch.export.save` refuses such types, and a process without linrec cannot load them.

    Args:
        mixer: a mixer with a state of constant size.

    Example:
        >>> import torch
        >>> from linrec import mixers
        >>> module = Exportable(mixers.build("rwkv4", 4))
        >>> program = torch.export.export(module, (torch.zeros(2, 20, 4), module.init_state(2)))
        >>> y, state = program.module()(torch.zeros(2, 20, 4), module.init_state(2))
        >>> type(state)
        <class 'tuple'>
    """

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer
        # used for the types only; its tensors are never read
        self._types = mixer.init_state(1)

    def init_state(self, batch: int) -> Any:
        """Return the initial state of `batch` sequences, as tensors and plain tuples."""
        return _plain(self.mixer.init_state(batch))

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: Any = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Any]:
        """Run the mixer; arguments and results are as in `Mixer.forward`, with plain tuples as states."""
        y, last = self.mixer(x, None if state is None else _typed(state, self._types), reset=reset, dt=dt)
        return y, _plain(last)

    if TYPE_CHECKING:
        __call__ = forward


def _plain(state: Any) -> Any:
    return tuple(_plain(part) for part in state) if isinstance(state, tuple) else state


def _typed(state: Any, types: Any) -> Any:
    if not isinstance(types, tuple):
        return state
    parts = [_typed(part, of) for part, of in zip(state, types, strict=True)]
    return tuple(parts) if type(types) is tuple else type(types)(*parts)
