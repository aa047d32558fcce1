"""Initial parameters of RWKV's layers, by channel and by the layer's place in the stack."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.head_norm import HeadNorm
from linrec.nn.token_shift import TokenShift

__all__ = ["Place", "first_bonus", "first_decay", "first_shares", "ramp", "start_matrix_state", "zigzag"]


# log(-log w) of the slowest and the fastest channel of RWKV-5 and RWKV-6
SLOWEST, FASTEST = -6.0, -1.0


class Place(NamedTuple):
    """The place of a layer in a stack; a layer that stands alone is the first of one.

    Args:
        layer: l, 0 for the first layer.
        n_layers: layers L of the stack.
    """

    layer: int = 0
    n_layers: int = 1

    @property
    def depth(self) -> float:
        """l / (L - 1): 0 for the first layer, 1 for the last of several."""
        return self.layer / max(self.n_layers - 1, 1)

    @property
    def height(self) -> float:
        """1 - l / L: 1 for the first layer, 1 / L for the last."""
        return 1 - self.layer / self.n_layers


def ramp(width: int, power: float) -> Float[Tensor, "d"]:
    """(i / width)^power for channels i = 0 .. width - 1: the share of the current token in a token shift.

    Example:
        >>> ramp(4, 2.0)
        tensor([0.0000, 0.0625, 0.2500, 0.5625])
    """
    return (torch.arange(width) / width) ** power


def first_decay(width: int, place: Place, *, low: float, high: float) -> Float[Tensor, "d"]:
    """low + (high - low) (i / (width - 1))^(0.7 + 1.3 depth): log(-log w) of each channel, slowest first.

    Deeper layers have more of the slow ones.

    Example:
        >>> first_decay(3, Place(1, 2), low=-6.0, high=-1.0)
        tensor([-6.0000, -4.7500, -1.0000])
    """
    return low + (high - low) * _fraction(width) ** (0.7 + 1.3 * place.depth)


def first_bonus(width: int, place: Place) -> Float[Tensor, "d"]:
    """depth (1 - i / (width - 1)) + 0.1 z_i with z = 0, 1, -1, 0, ..: u of a matrix state.

    Example:
        >>> first_bonus(3, Place(1, 2))
        tensor([ 1.0000,  0.6000, -0.1000])
    """
    return place.depth * (1 - _fraction(width)) + 0.1 * zigzag(width)


def first_shares(width: int, place: Place) -> dict[str, Float[Tensor, "d"]]:
    """Return the shares of the last token in the inputs of r, k, v, w and g, for RWKV-5 and RWKV-6.

        mu_k = mu_w = 1 - (i/d)^(1 - l/L)    mu_r = mu_g = 1 - (i/d)^((1 - l/L) / 2)
        mu_v = mu_k - 0.3 l/(L - 1)

    Example:
        >>> first_shares(4, Place())["k"]
        tensor([1.0000, 0.7500, 0.5000, 0.2500])
    """
    k, r = 1 - ramp(width, place.height), 1 - ramp(width, 0.5 * place.height)
    return {"r": r, "k": k, "v": k - 0.3 * place.depth, "w": k, "g": r}


@torch.no_grad()
def start_matrix_state(
    place: Place,
    shift: TokenShift,
    mixtures: Sequence[str],
    log_decay: nn.Parameter,
    bonus: nn.Parameter | None,
    norm: HeadNorm | None,
) -> None:
    """Start the parameters of a layer of RWKV-5 or RWKV-6 from its place in the stack.

    Args:
        place: the layer's place.
        shift: gets `first_shares` of the mixtures; mu_x gets the share of k.
        mixtures: the inputs that the token shift makes, by the names "r", "k", "v", "w" and "g".
        log_decay: log(-log w) of each channel (d,), gets `first_decay` from -6 to -1.
        bonus: u (d,), gets `first_bonus`.
        norm: gets weights of ((l + 1) / L)^0.7.

    Source:
        BlinkDL/RWKV-LM, the released code of RWKV-5 and RWKV-6.

    Example:
        >>> log_decay = nn.Parameter(torch.zeros(3))
        >>> start_matrix_state(Place(), TokenShift(3, 1), ["k"], log_decay, None, None)
        >>> log_decay[0].item(), log_decay[-1].item()
        (-6.0, -1.0)
    """
    shares = first_shares(shift.d_model, place)
    shift.start([shares[name] for name in mixtures], shares["k"])
    log_decay.copy_(first_decay(len(log_decay), place, low=SLOWEST, high=FASTEST))
    if bonus is not None:
        bonus.copy_(first_bonus(len(bonus), place))
    if norm is not None:
        norm.weight.fill_(((place.layer + 1) / place.n_layers) ** 0.7)


def zigzag(width: int) -> Float[Tensor, "d"]:
    """Return 0, 1, -1, 0, 1, -1, .., which tells neighbouring channels apart.

    Example:
        >>> zigzag(4)
        tensor([ 0.,  1., -1.,  0.])
    """
    return ((torch.arange(width) + 1) % 3 - 1).to(torch.get_default_dtype())


def _fraction(width: int) -> Tensor:
    return torch.arange(width) / max(width - 1, 1)
