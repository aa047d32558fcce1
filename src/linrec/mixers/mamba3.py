"""Mamba-3: Improved Sequence Modeling using State Space Principles (Lahoti and others, 2026).

    z_t, X_t, B'_t, C'_t = W u_t
    dt_t = softplus(W_dt u_t + b_dt)
    A_t = -max(softplus(W_A u_t), A_floor)
    lambda_t = sigmoid(W_lambda u_t)
    theta_t = pi tanh(W_theta u_t)
    Phi_t = Phi_{t-1} + dt_t theta_t
    B_t = R(Phi_t) (RMSNorm(B'_t) + b_B)                                 (10)
    C_t = R(Phi_t) (RMSNorm(C'_t) + b_C)                                 (10)
    alpha_t = exp(dt_t A_t)                                               (6)
    beta_t = (1 - lambda_t) dt_t alpha_t                                  (6)
    gamma_t = lambda_t dt_t                                               (6)
    h_t = alpha_t h_{t-1} + beta_t B_{t-1} X_{t-1}^T + gamma_t B_t X_t^T (11)
    Y_t = h_t^T C_t + D X_t                                              (11)
    y_t = W_o (Y_t * SiLU(z_t))

u input (the argument `x`), z gate, X value, B key, C query, dt step size and -A rate of decay of a head,
lambda weight of the current step in the trapezoidal rule, theta angles per unit of time, the same in all
heads, Phi angles of a head, R(Phi) rotation of the channels 2j and 2j + 1 by angle j, h state, Y output of a
head, y output, D, b_dt, b_B and b_C learned numbers of a head, t time. The heads of a group share B' and C'.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.decays import softplus, step_bias
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import GroupRMSNorm, RMSNorm
from linrec.nn.parameters import mark
from linrec.nn.rotary import Rotary, running_turns, turned
from linrec.nn.token_shift import token_shift
from linrec.ops import inspection
from linrec.ops.core.call import Call
from linrec.ops.gate_loop import gate_loop
from linrec.ops.inspection import note
from linrec.rules import at_least, divisor, require, span

__all__ = ["Mamba3", "Mamba3State", "TrapezoidState", "trapezoid_mixing", "trapezoidal_gate_loop"]

Rate = Literal["softplus", "heavy_tail"]
Discretization = Literal["trapezoidal", "classical", "euler"]
Rotation = Literal["data", "standard", "none"]
Biases = Literal["both", "B", "C", "none"]
OutputNorm = Literal["none", "head", "rms"]

# of the paper's models
CHANNELS_PER_HEAD = 64
# lambda where it is not learned
_LAMBDAS = {"trapezoidal": math.nan, "classical": 0.5, "euler": 1.0}


class TrapezoidState(NamedTuple):
    """State of `trapezoidal_gate_loop`.

    Attributes:
        S: (b, h, dk, dv).
        k: the keys of the last step, heads side by side, (b, h dk).
        v: the values of the last step, (b, h dv).
    """

    S: Float[Tensor, "b h dk dv"]
    k: Float[Tensor, "b hdk"]
    v: Float[Tensor, "b hdv"]

    @classmethod
    def zeros(cls, batch: int, h: int, dk: int, dv: int, **like: Any) -> "TrapezoidState":
        """Return the state at the start of `batch` sequences, in the dtype and on the device given."""
        k, v = (torch.zeros(batch, h * d, **like) for d in (dk, dv))
        return cls(gate_loop.empty_state(batch, h, dk, dv, **like), k, v)


class Mamba3State(NamedTuple):
    """State of Mamba-3.

    Attributes:
        memory: h (b, h, N, P), and the turned B (b, h N) and X (b, h P) of the last step.
        Phi: angles modulo 2 pi, (b, h pairs); None without rotation.
    """

    memory: TrapezoidState
    Phi: Float[Tensor, "b angles"] | None


class Mamba3(Mixer):
    """h_t = alpha_t h_{t-1} + beta_t B_{t-1} X_{t-1}^T + gamma_t B_t X_t^T, with turning B and C (eq. 11).

    The defaults are the paper's layer with a single input and output (SISO). The variant with several inputs
    and outputs (MIMO), where B, C and X have a rank, is not included. The paper's models alternate the layer
    with SwiGLU.

    | the paper's ablation | argument |
    |---|---|
    | lambda = 1/2, lambda = 1 (table 8) | `discretization="classical"`, `"euler"` |
    | standard RoPE, no RoPE (table 5b) | `rotation="standard"`, `"none"` |
    | biases of B and C (table 10b) | `biases="B"`, `"C"`, `"none"` |
    | initial biases (table 10a) | `bias_init=(0, 0)`, `(0, 1)`, `(-1, 1)` |
    | norm before the output projection (table 9) | `output_norm="head"`, `"rms"`, with `norm_before_gate` |
    | state size (figure 3) | `d_state` |

    Angles have the sign of the released code, which turns by R where eq. 10 has its transpose: theta of the
    other sign. Since June 2026 the released code has `rate="heavy_tail"`, for stability at high learning
    rates.

    When training starts, softplus(b_dt) is log-uniform in `dt_init` but at least `dt_floor`, b_B, b_C and D
    are one, and all else is as torch draws it. b_dt and D have no weight decay.

    Args:
        d_model: width of the sequence.
        expand: width of X over all heads, as a multiple of `d_model`.
        n_heads: heads h. None is the largest number that leaves at least 64 channels P to each head, or 1.
        d_state: channels N of B and C.
        n_groups: groups of heads that share B' and C'.
        rate: activation of -A: "softplus", or "heavy_tail", which is 1 + a for a >= 0 and 1 / (1 - a) below.
        discretization: "trapezoidal" learns lambda, "classical" is lambda = 1/2, "euler" is lambda = 1.
        rotation: "data" turns pair j by dt theta_j, "standard" by 10000^(-j / pairs) at each step, "none" by
            nothing.
        rope_fraction: fraction of the channels of B and C that turn, rounded down to pairs.
        biases: which of b_B and b_C there are.
        bias_init: (low, high), range of b_B and b_C when training starts.
        output_norm: "none", or RMSNorm of Y, over each head with "head", over all channels with "rms".
        norm_before_gate: whether it is RMSNorm(Y) * SiLU(z); else RMSNorm(Y * SiLU(z)).
        norm_eps: of the norms.
        A_floor: the smallest rate of decay -A.
        dt_init: (low, high), range of dt at u = 0 when training starts.
        dt_floor: the smallest dt when training starts.

    Raises:
        ValueError: heads that do not divide the width, groups that do not divide the heads, too few channels
            to turn, a number out of range, an empty range, or an unknown name of a variant.

    Source:
        Lahoti and others (2026), propositions 1 to 4, section 3.4. The default of the norm, tanh, `A_floor`
        and initial values come from the released code.

    Example:
        >>> mixer = Mamba3(64, d_state=16)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.memory.S.shape, state.Phi.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 2, 16, 64]), torch.Size([2, 8]))
    """

    recurrence = "gate_loop"
    B_bias: nn.Parameter | None
    C_bias: nn.Parameter | None

    def __init__(
        self,
        d_model: int,
        *,
        expand: int = 2,
        n_heads: int | None = None,
        d_state: int = 128,
        n_groups: int = 1,
        rate: Rate = "softplus",
        discretization: Discretization = "trapezoidal",
        rotation: Rotation = "data",
        rope_fraction: float = 0.5,
        biases: Biases = "both",
        bias_init: tuple[float, float] = (1.0, 1.0),
        output_norm: OutputNorm = "none",
        norm_before_gate: bool = True,
        norm_eps: float = 1e-5,
        A_floor: float = 1e-4,
        dt_init: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_state=d_state, cure="The paper's layer has 128.")
        at_least(1, expand=expand)
        at_least(0, norm_eps=norm_eps, A_floor=A_floor, dt_floor=dt_floor)
        span(-math.inf, math.inf, bias_init=bias_init)
        d_inner = expand * d_model
        sizes = split_width("expand * d_model", d_inner, n_heads, least=CHANNELS_PER_HEAD)
        self.n_heads, self.d_head = sizes
        divisor("n_heads", self.n_heads, n_groups=n_groups)
        pairs = 0 if rotation == "none" else int(d_state * rope_fraction) // 2
        require(
            rotation == "none" or (pairs > 0 and rope_fraction <= 1),
            "`rope_fraction` must be at most 1 and leave a pair of the `d_state` channels to turn; got "
            f'{rope_fraction} of {d_state}. Pass `rotation="none"` for a real state.',
        )
        self.d_state, self.pairs = d_state, pairs
        self.A_floor, self.norm_before_gate = A_floor, norm_before_gate

        self.widths = [d_inner, d_inner, n_groups * d_state, n_groups * d_state]
        self.zXBC = nn.Linear(d_model, sum(self.widths), bias=False)
        self.dt = GateLinear(d_model, self.n_heads)
        with torch.no_grad():
            self.dt.bias.copy_(step_bias(self.n_heads, dt_init, floor=dt_floor))
        mark(self.dt, "bias", group="default", weight_decay=False)
        self.A, self.rate = GateLinear(d_model, self.n_heads, bias=False), _RATES[rate]
        self.constant, learned = _LAMBDAS[discretization], discretization == "trapezoidal"
        self.lambda_ = GateLinear(d_model, self.n_heads, bias=False) if learned else None
        self.theta = GateLinear(d_model, pairs, bias=False) if rotation == "data" else None
        self.rotary = Rotary(2 * pairs) if rotation == "standard" else None
        self.B_norm, self.C_norm = RMSNorm(d_state, eps=norm_eps), RMSNorm(d_state, eps=norm_eps)
        for name in ("B_bias", "C_bias"):
            present = biases in ("both", name[0])
            bias = torch.empty(self.n_heads, d_state).uniform_(*bias_init) if present else None
            self.register_parameter(name, bias if bias is None else nn.Parameter(bias))
            if present:
                mark(self, name, group="channel", weight_decay=True, float32=True)
        self.D = nn.Parameter(torch.ones(self.n_heads, 1))
        mark(self, "D", group="channel", weight_decay=False)
        groups = self.n_heads if output_norm == "head" else 1
        with_norm = output_norm != "none"
        self.norm = GroupRMSNorm(d_inner, n_groups=groups, eps=norm_eps) if with_norm else nn.Identity()
        self.out = nn.Linear(d_inner, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the state."""
        memory, Phi = (None, None) if state is None else state
        z, X, B, C = self.zXBC(x).split(self.widths, dim=-1)
        X = X.unflatten(-1, (self.n_heads, self.d_head))
        dt = softplus(self.dt(x))
        A = -self.rate(self.A(x)).clamp(min=self.A_floor)
        lam = self.constant if self.lambda_ is None else torch.sigmoid(self.lambda_(x))
        B, C = self._of_heads(B, self.B_norm, self.B_bias), self._of_heads(C, self.C_norm, self.C_bias)
        angles = None
        if self.theta is not None:
            angles = dt[..., None] * (math.pi * torch.tanh(self.theta(x)))[..., None, :]
        elif self.rotary is not None:
            angles = self.rotary.frequencies(dt.dtype, x.device).expand(*dt.shape, -1)
        if angles is not None:
            note(angles=angles)
            turns, Phi = running_turns(angles, Phi, reset=reset)
            B, C = turned(B, *turns), turned(C, *turns)
        Y, memory = trapezoidal_gate_loop(C, B, X, dt * A, dt, lam, state=memory, reset=reset)
        y, gate = (Y + self.D * X).flatten(2), functional.silu(z)
        y = self.norm(y) * gate if self.norm_before_gate else self.norm(y * gate)
        return self.out(y.to(x.dtype)), Mamba3State(memory, Phi)

    def transitions(self, x: Tensor) -> Transitions:
        """Return alpha, and the angles by which the channels of B and C turn, 0 where they do not."""
        call, notes = self._memory(x, None)
        found = inspection.transitions(call)
        assert found is not None
        if not self.pairs:
            return Transitions(*found)
        phase = notes["angles"].repeat_interleave(2, -1)
        return Transitions(found[0], functional.pad(phase, (0, self.d_state - 2 * self.pairs)).flatten(2))

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over heads of the magnitudes of the weights of X, without D."""
        return trapezoid_mixing(*self._memory(x, reset))

    def _of_heads(self, x: Tensor, norm: nn.Module, bias: Tensor | None) -> Tensor:
        """Return B or C (b, t, h, N) before its turn, in float32 or better, from (b, t, groups times N)."""
        x = norm(x.unflatten(-1, (-1, 1, self.d_state))).to(self.state_dtype)
        x = x.expand(-1, -1, -1, self.n_heads // x.shape[2], -1).flatten(2, 3)
        return x if bias is None else x + bias


def trapezoidal_gate_loop(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "b t h"],
    dt: Float[Tensor, "b t h"],
    weight: Float[Tensor, "b t h"] | float,
    *,
    state: TrapezoidState | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], TrapezoidState]:
    """S_t = a_t S_{t-1} + beta_t k_{t-1}^T v_{t-1} + gamma_t k_t^T v_t and y_t = q_t S_t.

        gamma_t = weight_t dt_t    beta_t = (1 - weight_t) dt_t a_t    a_t = exp(log_decay_t)

    S without its last term, G_t = S_t - gamma_t k_t^T v_t, is a recurrence with a single outer product:

        G_t = a_t G_{t-1} + (a_t gamma_{t-1} + beta_t) k_{t-1}^T v_{t-1}
        y_t = q_t G_t + gamma_t (q_t k_t^T) v_t

    A call starts from G_0 = S_0 with gamma_0 = 0. The first step of a sequence has no step before. q and k
    are in float32 or float64; the operator runs in the precision of v. dt is the step size, and `weight` in
    [0, 1] the weight of the current step: 1 is Euler's rule, 1/2 the trapezoidal rule with equal weights.

    Source:
        Lahoti and others, Mamba-3 (2026), eq. 6 and 7.
    """
    S, last_k, last_v = (None,) * 3 if state is None else state
    heads = q.shape[2], -1
    gamma = weight * dt
    past_k, last_k = token_shift(k.flatten(2), last_k, reset=reset)
    past_v, last_v = token_shift(v.flatten(2), last_v, reset=reset)
    past_gamma, last_gamma = token_shift(gamma, reset=reset)
    gate = log_decay.exp() * (past_gamma + dt - gamma)
    own = gamma * (q * k).sum(-1)
    note(gate=gate, own=own)
    inputs = gate[..., None] * past_v.unflatten(-1, heads)
    past_k = past_k.unflatten(-1, heads)
    y, G = gate_loop(q.to(v.dtype), past_k.to(v.dtype), inputs.to(v.dtype), log_decay, state=S, reset=reset)
    scaled_k = last_gamma[..., None] * last_k.unflatten(-1, heads)
    S = G + scaled_k[..., None] * last_v.unflatten(-1, heads)[..., None, :]
    return y + own[..., None] * v, TrapezoidState(S, last_k, last_v)


def trapezoid_mixing(call: Call | None, notes: dict[str, Tensor]) -> Float[Tensor, "b t t"]:
    """Return `inspection.token_mixing` of `trapezoidal_gate_loop`, from its call of `gate_loop` and notes."""
    mixing = inspection.token_mixing(call, notes)
    assert mixing is not None
    # the operator's value of step m is v of step m - 1
    return functional.pad(mixing[..., 1:], (0, 1)) + torch.diag_embed(notes["own"].abs().mean(-1))


def heavy_tail(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 1 + z for z >= 0 and 1 / (1 - z) below: above zero, and falling slower than softplus.

    Source:
        The code released with Mamba-3 (Lahoti and others, 2026), since June 2026.
    """
    return z.clamp(min=0) + 1 / (1 - z.clamp(max=0))


_RATES = {"softplus": softplus, "heavy_tail": heavy_tail}
