"""Falcon-H1: A Family of Hybrid-Head Language Models (Zuo and others, 2025).

    A_t = W_A [softmax(q_t K_t^T / sqrt(d_head)) V_t, ..]
    S_t = a_t S_{t-1} + B_t (dt_t X_t)^T
    M_t = W_M [(S_t^T C_t + D X_t) * SiLU(z_t), ..]
    y_t = A_t + M_t

A attention (`linrec.mixers.attention`), with query q, keys K and values V of the steps so far; M Mamba-2
(`linrec.mixers.mamba2`), with state S, decay a, step size dt, key B, value X, query C and gate z; [..] over
heads, of which A and M have their own numbers; y output, t time. Both read the same input x.
"""

from typing import Any

import torch
from torch import Tensor

from linrec.mixers.attention import Attention
from linrec.mixers.mamba2 import Mamba2
from linrec.nn.mixer import Mixer, State
from linrec.rules import require

__all__ = ["FalconH1"]


class FalconH1(Mixer):
    """y_t = A_t + M_t: heads of attention and heads of Mamba-2 read the same input.

    The released models multiply inputs, projections and outputs by constants. The weights can contain these
    constants, so the layer omits them; `linrec.convert` multiplies the weights.

    | Falcon-H1 0.5B, width 1024 | arguments |
    |---|---|
    | `attention` | `n_heads=8`, `kv_heads=2`, `d_head=64`, `rotary_base=1e11` |
    | `mamba2` | `d_inner=1536`, `n_heads=24`, `output_norm="none"` |

    Inspection shows Mamba-2 alone.

    Args:
        d_model: width of the sequence.
        attention: keyword arguments of `Attention`; None is its defaults. It must be causal.
        mamba2: keyword arguments of `Mamba2`; None is its defaults.

    Raises:
        ValueError: an argument that `Attention` or `Mamba2` refuses, or attention that is not causal.
        TypeError: an argument that `Attention` or `Mamba2` does not have.

    Source:
        Zuo and others (2025): the parallel hybrid block, before its channel mixing; sizes come from the
        released configurations.

    Example:
        >>> mixer = FalconH1(64, attention={"n_heads": 4}, mamba2={"d_state": 16})
        >>> y, (cache, (tail, S)) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, cache.position, S.shape
        (torch.Size([2, 10, 64]), tensor([10, 10]), torch.Size([2, 2, 16, 64]))
    """

    # of Mamba-2
    recurrence = "gate_loop"

    def __init__(
        self,
        d_model: int,
        *,
        attention: dict[str, Any] | None = None,
        mamba2: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(d_model)
        self.attention = Attention(d_model, **attention or {})
        self.mamba2 = Mamba2(d_model, **mamba2 or {})
        require(
            self.attention.causal,
            "`attention` must be causal beside Mamba-2, which sees the past alone; got causal=False.",
        )

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the states of attention and of Mamba-2."""
        cache, memory = (None, None) if state is None else state
        attended, cache = self.attention(x, cache, reset=reset)
        remembered, memory = self.mamba2(x, memory, reset=reset)
        return attended + remembered, (cache, memory)

    @property
    def state_grows(self) -> bool:
        """Whether the cache of `attention` grows without a bound."""
        return self.attention.state_grows

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return the initial states of attention and of Mamba-2."""
        return tuple(part.init_state(batch, device=device) for part in (self.attention, self.mamba2))

    @property
    def state_size(self) -> int:
        """Elements per step that attention caches. Mamba-2's state, which does not grow, is not counted."""
        return self.attention.state_size
