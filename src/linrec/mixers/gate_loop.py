"""GateLoop: Fully Data-Controlled Linear Recurrence for Sequence Modeling (Katsch, 2023).

    q_n = Linear_q(x_n)   k_n = Linear_k(x_n)   v_n = Linear_v(x_n)     (24)
    a_n = f(Linear_gamma(x_n)) exp(i g(Linear_theta(x_n)))              (25)
    h_n = h_{n-1} a_n + k_n^T v_n                                        (7)
    y_n = Re(q_n h_n)                                              (8), (C)

x input, q output gate (query), k input gate (key), v value, a state transition, h hidden state, y output;
f and g activations of magnitude and phase, n time. Weights are real and the real part is returned
(appendix C).
"""

import torch
from torch import Tensor, nn

from linrec.nn.gates import MagnitudeActivation, PhaseActivation, Transition, TransitionKind
from linrec.nn.head_sizes import key_value_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, gated, make_norm
from linrec.nn.projections import projected
from linrec.ops.gate_loop import gate_loop
from linrec.rules import require

__all__ = ["GateLoop"]


class GateLoop(Mixer):
    """h_n = h_{n-1} a_n + k_n^T v_n, y_n = Re(q_n h_n) with data-controlled q, k, v and a (eq. 7, 8, 24, 25).

    The defaults are the paper's layer, which ends with eq. 8: a head for each key channel (d_h = 1), sigmoid
    magnitudes, free phases. The optional norm, gate and projection follow in this order: y = Linear_o(norm(y)
    * SiLU(Linear_g(x))).

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is `d_qk`, the paper's max-headed variant.
        d_qk: width of q, k and a over all heads; dk = d_qk / n_heads. None is `d_model`.
        d_v: width of v over all heads; dv = d_v / n_heads. None is `d_model`. Another value needs
            `output_projection=True`.
        magnitude_activation: f, "sigmoid" or LRU's "stable_exp".
        phase_activation: g, "identity", "tanh" (times pi), or "none" for a real transition.
        transition: "data", or "fixed" for learned constants in place of eq. 25.
        magnitude_init: range of |a| at x = 0 when training starts, None for torch's own; see
            `linrec.nn.Transition`, also for the next two.
        phase_init: largest phase at x = 0 when training starts, in radians, None for torch's own.
        transition_weight_scale: factor on the initial weights of the transition's two projections.
        scale_query_init: whether the initial rows of Linear_q are multiplied by sqrt(1 - |a|^2), |a| of the
            same channel at x = 0. A slow channel sums more inputs. With this factor, the outputs of all
            channels start with the same variance, as with LRU's factor gamma (Orvieto et al., 2023, section
            3.4).
        gate_bias_init: initial biases of Linear_q and Linear_k, None for torch's own; `scale_query_init` does
            not scale these biases. With 1, both gates are open when training starts: the layer filters v
            linearly, and the projections of q and k modulate the result.
        bias: whether the projections have biases (the paper's footnote 1 omits them from the equations).
        output_norm: "none", "layer" or "rms", over all d_v channels.
        output_gate: whether y is multiplied by SiLU(Linear_g(x)).
        output_projection: whether a Linear from d_v to d_model ends the layer.

    Raises:
        ValueError: widths that the heads do not divide, or an unknown name of a variant.

    Source:
        GateLoop, section 4 and appendix C. Norm, gate and projection are not in the paper.

    Example:
        >>> mixer = GateLoop(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 64, 1, 1]), torch.complex64)
    """

    recurrence = "gate_loop"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        magnitude_activation: MagnitudeActivation = "sigmoid",
        phase_activation: PhaseActivation = "identity",
        transition: TransitionKind = "data",
        magnitude_init: tuple[float, float] | None = None,
        phase_init: float | None = None,
        transition_weight_scale: float = 1.0,
        scale_query_init: bool = False,
        gate_bias_init: float | None = None,
        bias: bool = True,
        output_norm: Norm = "none",
        output_gate: bool = False,
        output_projection: bool = False,
    ) -> None:
        super().__init__(d_model)
        d_qk = d_model if d_qk is None else d_qk
        d_v = d_model if d_v is None else d_v
        n_heads = d_qk if n_heads is None else n_heads
        self.n_heads, self.d_key, self.d_value = key_value_heads(n_heads, d_qk, d_v, width=d_model)
        require(
            output_projection or d_v == d_model,
            f"`d_v` must equal `d_model` = {d_model} where nothing follows the recurrence; got {d_v}. "
            "Pass `output_projection=True` to project back.",
        )
        require(
            bias or gate_bias_init is None,
            "`gate_bias_init` sets the biases of Linear_q and Linear_k and needs `bias=True`; "
            "got `bias=False`.",
        )

        self.q = nn.Linear(d_model, d_qk, bias=bias)
        self.k = nn.Linear(d_model, d_qk, bias=bias)
        self.v = nn.Linear(d_model, d_v, bias=bias)
        self.transition = Transition(
            d_model,
            self.n_heads,
            self.d_key,
            magnitude_activation=magnitude_activation,
            phase_activation=phase_activation,
            transition=transition,
            magnitude_init=magnitude_init,
            phase_init=phase_init,
            transition_weight_scale=transition_weight_scale,
            bias=bias,
        )
        if scale_query_init:
            with torch.no_grad():
                log_decay, _ = self.transition(torch.zeros(1, 1, d_model, dtype=self.q.weight.dtype))
                gain = torch.sqrt(-torch.expm1(2 * log_decay)).flatten().to(self.q.weight.dtype)
                self.q.weight.mul_(gain[:, None])
                if bias:
                    self.q.bias.mul_(gain)
        if gate_bias_init is not None:
            nn.init.constant_(self.q.bias, gate_bias_init)
            nn.init.constant_(self.k.bias, gate_bias_init)
        self.norm = make_norm(output_norm, d_v)
        self.gate = nn.Linear(d_model, d_v, bias=bias) if output_gate else None
        self.out = nn.Linear(d_v, d_model, bias=bias) if output_projection else nn.Identity()

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and h (b, h, dk, dv)."""
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in qkv)
        log_a, phase = self.transition(x)
        y, h = gate_loop(q, k, v, log_a, phase, state=state, reset=reset)
        return self.out(gated(self.norm(y.flatten(-2)), g)), h
