"""Softmax attention with data-controlled relative positions, section 3.4 of GateLoop (Katsch, 2023).

    q_n = Linear_q(x_n)   k_n = Linear_k(x_n)   v_n = Linear_v(x_n)     (24)
    a_n = f(Linear_gamma(x_n)) exp(i g(Linear_theta(x_n)))              (25)
    Qbar = Q * Pi(A)      Kbar = K * Pi(A)^-1                       (18, 19)
    Y = Softmax(M_-inf(Re(Qbar Kbar^T))) V                          (22, 23)

x input, q query, k key, v value, a state transition, Pi(A) its running product, M_-inf the causal mask, y
output; f and g activations of magnitude and phase, n time. Softmax needs real scores, which are the real part
of the complex scores, as in GateLoop's output (appendix C).
"""

from torch import Tensor, nn

from linrec.nn.gates import MagnitudeActivation, PhaseActivation, Transition, TransitionKind
from linrec.nn.head_sizes import key_value_heads
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.ops.attention import gate_loop_attention
from linrec.rules import require

__all__ = ["GateLoopAttention"]


class GateLoopAttention(Mixer):
    """Y = Softmax(M_-inf(Re(Qbar Kbar^T))) V: attention with data-controlled positions (eq. 22, 23).

    The paper has equations without an experiment, so the defaults follow the equations exactly: one head,
    scores without a factor, nothing after eq. 23. The state is a cache of keys and values that grows with
    every step; time and memory are quadratic in the length.

    Args:
        d_model: width of the sequence.
        n_heads: heads h.
        d_qk: width of q, k and a over all heads; dk = d_qk / n_heads. None is `d_model`.
        d_v: width of v over all heads; dv = d_v / n_heads. None is `d_model`. Another value needs
            `output_projection=True`.
        scale: factor of the scores; 1 / sqrt(dk) is usual elsewhere.
        magnitude_activation: f, "sigmoid" or LRU's "stable_exp".
        phase_activation: g, "identity", "tanh" (times pi), or "none" for a real transition.
        transition: "data", or "fixed" for learned constants in place of eq. 25.
        magnitude_init: range of |a| at x = 0 when training starts, None for torch's own; see
            `linrec.nn.Transition`, also for the next two.
        phase_init: largest phase at x = 0 when training starts, in radians, None for torch's own.
        transition_weight_scale: factor on the initial weights of the transition's two projections.
        bias: whether the projections have biases.
        output_projection: whether a Linear from d_v to d_model ends the layer.

    Raises:
        ValueError: widths that the heads do not divide, or an unknown name of a variant.

    Source:
        GateLoop (Katsch, 2023), section 3.4, with the projections of section 4.

    Example:
        >>> import torch
        >>> mixer = GateLoopAttention(64, n_heads=4)
        >>> y, cache = mixer(torch.zeros(2, 10, 64))
        >>> y, cache = mixer(torch.zeros(2, 1, 64), cache)
        >>> y.shape, cache.k.shape
        (torch.Size([2, 1, 64]), torch.Size([2, 11, 4, 16]))
    """

    recurrence = "gate_loop_attention"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 1,
        d_qk: int | None = None,
        d_v: int | None = None,
        scale: float = 1.0,
        magnitude_activation: MagnitudeActivation = "sigmoid",
        phase_activation: PhaseActivation = "identity",
        transition: TransitionKind = "data",
        magnitude_init: tuple[float, float] | None = None,
        phase_init: float | None = None,
        transition_weight_scale: float = 1.0,
        bias: bool = True,
        output_projection: bool = False,
    ) -> None:
        super().__init__(d_model)
        heads = key_value_heads(n_heads, d_qk, d_v, width=d_model)
        (self.n_heads, self.d_key, self.d_value), self.scale = heads, scale
        require(
            output_projection or heads.d_v == d_model,
            f"`d_v` must equal `d_model` = {d_model} where nothing follows the attention; got {heads.d_v}. "
            "Pass `output_projection=True` to project back.",
        )

        self.q = nn.Linear(d_model, heads.d_qk, bias=bias)
        self.k = nn.Linear(d_model, heads.d_qk, bias=bias)
        self.v = nn.Linear(d_model, heads.d_v, bias=bias)
        self.transition = Transition(
            d_model,
            n_heads,
            self.d_key,
            magnitude_activation=magnitude_activation,
            phase_activation=phase_activation,
            transition=transition,
            magnitude_init=magnitude_init,
            phase_init=phase_init,
            transition_weight_scale=transition_weight_scale,
            bias=bias,
        )
        self.out = nn.Linear(heads.d_v, d_model, bias=bias) if output_projection else nn.Identity()

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and the cache of all steps so far."""
        q, k = (linear(x).unflatten(-1, (self.n_heads, self.d_key)) for linear in (self.q, self.k))
        v = self.v(x).unflatten(-1, (self.n_heads, self.d_value))
        log_a, phase = self.transition(x)
        y, cache = gate_loop_attention(q, k, v, log_a, phase, state=state, reset=reset, scale=self.scale)
        return self.out(y.flatten(-2)), cache

    @property
    def state_size(self) -> int:
        """Elements per cached step: key, value, decay and phase of every head, and whether it is alive."""
        keys = 2 if self.transition.phase is None else 3
        return self.n_heads * (keys * self.d_key + self.d_value) + 1

    def transitions(self, x: Tensor) -> Transitions:
        """Return a_n of eq. 25, (h dk,) with `transition="fixed"`: the operator's gates are of all steps."""
        log_a, phase = self.transition(x)
        return Transitions(log_a.exp().flatten(-2), None if phase is None else phase.flatten(-2))
