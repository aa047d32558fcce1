"""The token shift of RWKV: every step sees the input of the step before."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.parameters import mark
from linrec.nn.projections import orthogonal_linear
from linrec.nn.stage import Stage
from linrec.ops.core.call import refuse_split_time
from linrec.rules import at_least

__all__ = ["TokenShift", "token_shift"]

# bound of the entries of B when training starts, as in the released code
LORA_BOUND = 0.01


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

    Raises:
        ValueError: the steps of a sequence are split over processes.

    Source:
        Peng and others, RWKV: Reinventing RNNs for the Transformer Era (2023), token shift.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
        >>> before, last = token_shift(x)
        >>> before.flatten().tolist(), last.item()
        ([0.0, 1.0, 2.0], 3.0)
    """
    # the first step of a part comes after the last one of another process
    refuse_split_time("token_shift")
    wide = torch.promote_types(x.dtype, torch.float32)
    if last is None:
        last = x.new_zeros(x.shape[0], x.shape[2])
    inputs = torch.cat([last[:, None].to(x.dtype), x], 1)
    before = inputs[:, :-1]
    if reset is not None:
        before = before.masked_fill(reset[..., None], 0)
    # a view would keep all inputs as long as the state
    return before, inputs[:, -1].to(wide, copy=True)


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

    Raises:
        ValueError: a `rank` below 1.

    Source:
        Eagle and Finch (Peng and others, 2024), lerp and ddlerp.

    Example:
        >>> shift = TokenShift(1, 2)
        >>> shift.start([torch.tensor([0.5]), torch.tensor([1.0])])
        >>> (k, v), last = shift(torch.tensor([2.0, 4.0]).reshape(1, 2, 1))
        >>> k.flatten().tolist(), v.flatten().tolist(), last.item()
        ([1.0, 3.0], [0.0, 2.0], 4.0)
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
