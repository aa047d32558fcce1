"""Mamba-2: Transformers are SSMs, Generalized Models and Efficient Algorithms Through SSD (Dao and Gu, 2024).

    z_t, X_t, B_t, C_t = W u_t
    X_t, B_t, C_t = SiLU(conv(X, B, C)_t)
    dt_t = softplus(W_dt u_t + b_dt)
    a_t = exp(-A dt_t)
    S_t = a_t S_{t-1} + B_t (dt_t X_t)^T
    Y_t = S_t^T C_t + D X_t
    y_t = W_o RMSNorm(Y_t * SiLU(z_t))

u input (the argument `x`), z gate, X value, B key, C query and dt step size of a head, A = exp(A_log), b_dt
and D learned numbers of a head, a decay, S state, Y output of a head, y output, conv a causal convolution of
a few steps, t time. The heads of a group share B and C.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn import feature_maps
from linrec.nn.decays import softplus, step_bias
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import GroupRMSNorm
from linrec.nn.parameters import mark
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.gate_loop import gate_loop
from linrec.ops.inspection import note
from linrec.rules import at_least, divisor, require, span

__all__ = ["Mamba2"]

Heads = Literal["multi_input", "multi_contract", "multi_expand", "multi_head"]
Projections = Literal["parallel", "sequential"]
Skip = Literal["head", "channel", "none"]
OutputNorm = Literal["rms", "none"]

# of the paper's models
CHANNELS_PER_HEAD = 64
# which of X, B and C every head has for itself
_OWN = {"multi_input": "X", "multi_contract": "C", "multi_expand": "B", "multi_head": "XBC"}


class Mamba2(Mixer):
    """S_t = a_t S_{t-1} + B_t (dt_t X_t)^T, a_t = exp(-A dt_t): one decay for a whole head.

    The defaults are the paper's layer. It stands alone in its block, without channel mixing, so that a model
    of it has twice the layers of a Transformer.

    | the paper's ablation | argument |
    |---|---|
    | B, C and dt from the convolved X, as in Mamba | `projections="sequential"`, `feature_map="identity"` |
    | without norm before the output projection | `output_norm="none"` |
    | heads that share B and C (MVA); X and B (MQA); X and C (MKA); nothing (MHA) | `heads` |
    | features of B and C | `feature_map="identity"`, `"relu"`, `"elu"`, `"performer"` and others |
    | state size | `d_state` |

    When training starts, A is uniform in `A_init`, softplus(b_dt) log-uniform in `dt_init` but at least
    `dt_floor`, D is one, and all else is as torch draws it. A_log, b_dt and D have no weight decay. The
    released language model of L layers starts with `out_scale` = 1 / sqrt(L).

    Args:
        d_model: width of the sequence.
        expand: width of X over all heads, as a multiple of `d_model`.
        d_inner: width of X over all heads; None is `expand` * `d_model`.
        n_heads: heads h. None is the largest number that leaves at least 64 channels to each head, or 1.
        d_state: channels of B and C, in front of the feature map.
        n_groups: groups of heads. The heads of a group share the parts that `heads` does not name; the norm
            is over a group.
        heads: the parts that every head has for itself: X with "multi_input", C with "multi_contract", B with
            "multi_expand", all three with "multi_head". Each group has a single copy of the other parts.
        projections: "parallel", all from u, or "sequential", B, C and dt from X.
        feature_map: of B and C, a name of `linrec.nn.feature_maps`. X has SiLU.
        conv_size: taps of the convolution of each channel of X, B and C ("sequential": X); None disables it.
        conv_bias: whether the convolution has biases.
        bias: whether the projections of z, X, B, C and of the output have biases; the projection of dt always
            has.
        output_bias: whether the projection of the output has a bias; None is `bias`.
        D: "head" or "channel", one number for each, or "none".
        output_norm: "rms" or "none".
        norm_before_gate: whether it is RMSNorm(Y) * SiLU(z).
        norm_eps: of the norm.
        A_init: (low, high), range of A when training starts.
        dt_init: (low, high), range of dt at u = 0 when training starts.
        dt_floor: the smallest dt when training starts.
        dt_limit: (low, high) that dt is clamped to; None disables it.
        out_scale: of the initial W_o.

    Raises:
        ValueError: heads that do not divide the width, groups that do not divide the heads, a `d_state` below
            1, an empty range, a feature map that turns, or an unknown name of a variant.

    Source:
        Dao and Gu (2024): the Mamba-2 architecture, and its ablations. Constants come from the released code.

    Example:
        >>> mixer = Mamba2(64, d_state=16)
        >>> y, (tail, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, tail.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 3, 160]), torch.Size([2, 2, 16, 64]))
    """

    recurrence = "gate_loop"

    def __init__(
        self,
        d_model: int,
        *,
        expand: int = 2,
        d_inner: int | None = None,
        n_heads: int | None = None,
        d_state: int = 128,
        n_groups: int = 1,
        heads: Heads = "multi_input",
        projections: Projections = "parallel",
        feature_map: str = "silu",
        conv_size: int | None = 4,
        conv_bias: bool = True,
        bias: bool = False,
        output_bias: bool | None = None,
        D: Skip = "head",
        output_norm: OutputNorm = "rms",
        norm_before_gate: bool = False,
        norm_eps: float = 1e-5,
        A_init: tuple[float, float] = (1.0, 16.0),
        dt_init: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        dt_limit: tuple[float, float] | None = None,
        out_scale: float = 1.0,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_state=d_state, cure="The paper's layer has 128.")
        at_least(1, expand=expand)
        at_least(0, out_scale=out_scale, norm_eps=norm_eps)
        span(0, math.inf, A_init=A_init)
        require(
            dt_limit is None or 0 <= dt_limit[0] <= dt_limit[1],
            f"`dt_limit` must be (low, high) with 0 <= low <= high; got {dt_limit}.",
        )
        name = "expand * d_model" if d_inner is None else "d_inner"
        d_inner = expand * d_model if d_inner is None else d_inner
        sizes = split_width(name, d_inner, n_heads, least=CHANNELS_PER_HEAD)
        self.n_heads, self.d_head = sizes
        divisor("n_heads", self.n_heads, n_groups=n_groups)
        sequential = projections == "sequential"
        # one SiLU follows the convolution, of X alone or of X, B and C
        silu = sequential or feature_map == "silu"
        phi = "identity" if silu and not sequential else feature_map
        self.phi = feature_maps.build_without_phase(phi, d_state, of="Mamba-2")
        widths = {"X": self.d_head, "B": d_state, "C": d_state}
        self.widths = [
            width * (self.n_heads if part in _OWN[heads] else n_groups) for part, width in widths.items()
        ]
        self.dt_limit, self.norm_before_gate = dt_limit, norm_before_gate

        convolved = self.widths[0] if sequential else sum(self.widths)
        self.d_inner = d_inner
        self.zXBC = nn.Linear(d_model, d_inner + convolved, bias=bias)
        self.conv = ShortConvolution(convolved, conv_size, bias=conv_bias, silu=silu)
        self.BC = nn.Linear(self.widths[0], sum(self.widths[1:]), bias=bias) if sequential else None
        self.dt = GateLinear(self.widths[0] if sequential else d_model, self.n_heads)
        with torch.no_grad():
            self.dt.bias.copy_(step_bias(self.n_heads, dt_init, floor=dt_floor))
        self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(*A_init).log())
        mark(self.dt, "bias", group="default", weight_decay=False)
        mark(self, "A_log", group="default", weight_decay=False, float32=True)
        self.D: nn.Parameter | None = None
        if D != "none":
            self.D = nn.Parameter(torch.ones(self.n_heads, 1 if D == "head" else self.d_head))
            mark(self, "D", group="channel", weight_decay=False)
        self.norm: nn.Module = nn.Identity()
        if output_norm == "rms":
            self.norm = GroupRMSNorm(d_inner, n_groups=n_groups, eps=norm_eps)
        self.out = nn.Linear(d_inner, d_model, bias=bias if output_bias is None else output_bias)
        with torch.no_grad():
            self.out.weight.mul_(out_scale)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S (b, h, N, P); with a convolution, its tail and S."""
        tail, S = self.conv.split(state)
        z, XBC = self.zXBC(x).tensor_split([self.d_inner], dim=-1)
        XBC, tail = self.conv(XBC, tail, reset=reset)
        if self.BC is None:
            X, B, C = XBC.split(self.widths, dim=-1)
            X, source = X if self.conv.silu else functional.silu(X), x
        else:
            source = X = XBC
            B, C = self.BC(X).split(self.widths[1:], dim=-1)
        dt = softplus(self.dt(source))
        if self.dt_limit is not None:
            dt = dt.clamp(*self.dt_limit)
        log_a = -torch.exp(self.A_log.to(dt.dtype)) * dt
        X = self._of_heads(X, self.d_head)
        B, C = (self.phi(self._of_heads(part, self.phi.d_head)) for part in (B, C))
        note(gate=dt)
        Y, S = gate_loop(C, B, (dt[..., None] * X).to(X.dtype), log_a, state=S, reset=reset)
        if self.D is not None:
            Y = Y + self.D * X
        y, gate = Y.flatten(-2), functional.silu(z)
        y = self.norm(y) * gate if self.norm_before_gate else self.norm(y * gate)
        return self.out(y.to(x.dtype)), self.conv.joined(tail, S)

    def _of_heads(self, x: Tensor, width: int) -> Tensor:
        """Return `x` (b, t, groups times width) as (b, t, h, width), the heads of a group alike."""
        x = x.unflatten(-1, (-1, 1, width))
        return x.expand(-1, -1, -1, self.n_heads // x.shape[2], -1).flatten(2, 3)
