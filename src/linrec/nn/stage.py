"""Parts in front of a mixer's recurrence that have a state, and that an argument may leave out."""

from typing import Any

from torch import nn

__all__ = ["Stage"]


class Stage(nn.Module):
    """Base class of parts in front of a recurrence, which return their input where they are left out.

    The state of a mixer is the pair of the states of the part and of the recurrence. Without the part, it is
    the state of the recurrence alone.

    Args:
        present: whether the mixer has the part.

    Example:
        >>> Stage(present=True).joined("tail", "S"), Stage(present=False).joined(None, "S")
        (('tail', 'S'), 'S')
        >>> Stage(present=False).split("S"), Stage(present=True).split(None)
        ((None, 'S'), (None, None))
    """

    def __init__(self, *, present: bool) -> None:
        super().__init__()
        self.present = present

    def split(self, state: Any) -> tuple[Any, Any]:
        """Return the states of the part and of the recurrence from the state of the mixer."""
        return (None, state) if state is None or not self.present else state

    def joined(self, own: Any, recurrent: Any) -> Any:
        """Return the state of the mixer from the states of the part and of the recurrence."""
        return (own, recurrent) if self.present else recurrent
