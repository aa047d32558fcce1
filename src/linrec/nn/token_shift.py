"""The token shift of RWKV, by which every step sees the step before, and where RWKV's layers start."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.norms import HeadNorm
from linrec.nn.parameters import mark
from linrec.nn.projections import orthogonal_linear
from linrec.nn.short_convolution import Stage
from linrec.ops.core.call import time_split
from linrec.rules import at_least

__all__ = [
    "Place",
    "TokenShift",
    "first_bonus",
    "first_decay",
    "first_shares",
    "ramp",
    "start_matrix_state",
    "token_shift",
    "zigzag",
]

# bound of the entries of B when training starts, as in the released code
LORA_BOUND = 0.01
# log(-log w) of the slowest and the fastest channel of RWKV-5 and RWKV-6
SLOWEST, FASTEST = -6.0, -1.0


def token_shift(
    x: Float[Tensor, "b t d"],
    last: Float[Tensor, "b d"] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b d"]]:
    """Return x_{t-1} for every t, with x_0 = last, and the input of the last step to go on from.

    Args:
        x: input (b, t, d).
        last: x_0 (b, d), in any precision; None means zeros.
        reset: (b, t) bool; where it is true, zeros are seen in place of the step before.

    Returns:
        x_{t-1} (b, t, d) in the dtype of `x`, and x_t of the last step (b, d) in float32 (float64 for double
        inputs); `last` for zero-length time.

    Source:
        Peng and others, RWKV: Reinventing RNNs for the Transformer Era (2023), token shift.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if last is None:
        last = x.new_zeros(x.shape[0], x.shape[2], dtype=wide)
    first, final, split = last[:, None], None, time_split()
    if split is not None:
        # the first step of a part comes after the last one of another process
        first, final = split.halo(x, first.to(wide), reset)
    inputs = torch.cat([first.to(x.dtype), x], 1)
    before = inputs[:, :-1]
    if reset is not None:
        before = before.masked_fill(reset[..., None], 0)
    # a view would keep all inputs as long as the state
    return before, inputs[:, -1].to(wide, copy=True) if final is None else final[:, 0]


class _Vectors(nn.ParameterList):
    """Parameters that a call returns, so that hooks of offloading run; torch's list refuses calls."""

    __call__ = nn.Module.__call__

    def forward(self) -> list[Tensor]:
        """Return the parameters."""
        return list(self)


class TokenShift(Stage):
    """x_z = x_t + (x_{t-1} - x_t) * mu_z: n mixtures of the current and the last token, each learned.

    With `rank`, the input chooses the mixtures, by projections of low rank of a further mixture:

        x_z = x_t + (x_{t-1} - x_t) * (mu_z + tanh(x_x A_z) B_z)
        x_x = x_t + (x_{t-1} - x_t) * mu_x

    All mu are zero, which is no shift, until `start` is called; A starts at zero and B uniform in +- 0.01.

    Args:
        d_model: width of the sequence.
        n: mixtures.
        rank: of A_z B_z; None leaves them and mu_x out.
        present: whether tokens are mixed; without, every x_z is x_t.

    Source:
        Eagle and Finch (Peng and others, 2024), lerp and ddlerp.
    """

    def __init__(self, d_model: int, n: int, *, rank: int | None = None, present: bool = True) -> None:
        super().__init__(present=present)
        at_least(1, rank=rank, or_none=True, cure="The paper's is 32.")
        self.d_model, self.n = d_model, n
        self.mu = _Vectors(torch.zeros(d_model) for _ in range(n if present else 0))
        self.mu_x: nn.Parameter | None = None
        if rank is not None and present:
            self.mu_x = nn.Parameter(torch.zeros(d_model))
            self.A = mark(orthogonal_linear(d_model, n * rank, gain=0.0), group="default", weight_decay=False)
            self.B = nn.Parameter(torch.empty(n, rank, d_model).uniform_(-LORA_BOUND, LORA_BOUND))
            mark(self, "B", group="default", weight_decay=False)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        last: Float[Tensor, "b d_model"] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[list[Tensor], Float[Tensor, "b d_model"] | None]:
        """Return the mixtures, each (b, t, d_model), and the last input; arguments as for `token_shift`."""
        if not self.present:
            return [x] * self.n, None
        before, last = token_shift(x, last, reset=reset)
        back = before - x
        if self.mu_x is None:
            return [x + back * mu for mu in self.mu()], last
        z = torch.tanh(self.A(x + back * self.mu_x)).unflatten(-1, (len(self.mu), -1))
        parts = (mu + z_n @ B for mu, z_n, B in zip(self.mu(), z.unbind(-2), self.B, strict=True))
        return [x + back * part for part in parts], last

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Float[Tensor, "b d_model"] | None:
        """Return the last input at the start of a sequence, zeros (batch, d_model)."""
        if not self.present:
            return None
        return torch.zeros(batch, self.d_model, dtype=dtype, device=device)

    def start(self, mu: Sequence[Tensor], mu_x: Tensor | None = None) -> None:
        """Set every mu, and mu_x where there is one, to vectors (d_model,)."""
        if not self.present:
            return
        with torch.no_grad():
            for parameter, value in zip(self.mu, mu, strict=True):
                parameter.copy_(value)
            if self.mu_x is not None and mu_x is not None:
                self.mu_x.copy_(mu_x)

    def extra_repr(self) -> str:
        """Return the sizes, which `print` shows."""
        rank = None if self.mu_x is None else self.B.shape[1]
        return f"d_model={self.d_model}, n={self.n}, rank={rank}, present={self.present}"


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
    """(i / width)^power for channels i = 0 .. width - 1: the share of the current token in a token shift."""
    return (torch.arange(width) / width) ** power


def first_decay(width: int, place: Place, *, low: float, high: float) -> Float[Tensor, "d"]:
    """low + (high - low) (i / (width - 1))^(0.7 + 1.3 depth): log(-log w) of each channel, slowest first.

    Deeper layers have more of the slow ones.
    """
    return low + (high - low) * _fraction(width) ** (0.7 + 1.3 * place.depth)


def first_bonus(width: int, place: Place) -> Float[Tensor, "d"]:
    """depth (1 - i / (width - 1)) + 0.1 z_i with z = 0, 1, -1, 0, ..: u of a matrix state."""
    return place.depth * (1 - _fraction(width)) + 0.1 * zigzag(width)


def first_shares(width: int, place: Place) -> dict[str, Float[Tensor, "d"]]:
    """Return the shares of the last token in the inputs of r, k, v, w and g, for RWKV-5 and RWKV-6.

    mu_k = mu_w = 1 - (i/d)^(1 - l/L)    mu_r = mu_g = 1 - (i/d)^((1 - l/L) / 2)
    mu_v = mu_k - 0.3 l/(L - 1)
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
    """
    shares = first_shares(shift.d_model, place)
    shift.start([shares[name] for name in mixtures], shares["k"])
    log_decay.copy_(first_decay(len(log_decay), place, low=SLOWEST, high=FASTEST))
    if bonus is not None:
        bonus.copy_(first_bonus(len(bonus), place))
    if norm is not None:
        norm.weight.fill_(((place.layer + 1) / place.n_layers) ** 0.7)


def zigzag(width: int) -> Float[Tensor, "d"]:
    """Return 0, 1, -1, 0, 1, -1, .., which tells neighbouring channels apart."""
    return ((torch.arange(width) + 1) % 3 - 1).to(torch.get_default_dtype())


def _fraction(width: int) -> Tensor:
    return torch.arange(width) / max(width - 1, 1)
