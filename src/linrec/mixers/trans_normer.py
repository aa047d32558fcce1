"""TransNormerLLM: A Faster and Better Large Language Model with Improved TransNormer (Qin and others, 2023).

    Q = phi(X W_q)    K = phi(X W_k)    V = X W_v    U = X W_u
    lambda = exp(-s_h (1 - l / (L - 1)))    s_h = 2^(-8 h / H)
    a_st = q_s^T k_t lambda^(s - t) cos(theta (s - t))
    O = SRMSNorm(sum_t a_st v_t) * U
    Y = O W_o

X input, Q query, K key, V value, U gate, phi Swish, lambda decay of head h = 1 .. H in layer l = 0 .. L - 1,
theta the learned frequencies of key channels (LRPE), a_st how much of step t is in step s, SRMSNorm(x) =
x / RMS(x) over all heads, Y output. As a recurrence, lambda is the magnitude of the transition and theta its
phase: q and k are real, so the real part of exp(i theta (s - t)) is all that is seen of it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.nn import feature_maps
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark
from linrec.ops.gate_loop import gate_loop, gate_loop_matrix

__all__ = ["TransNormer"]

FeatureMap = Literal["silu", "elu", "identity"]
OutputNorm = Literal["simple_rms", "rms", "layer", "none"]
Positions = Literal["mix", "lrpe_d", "lrpe", "decay", "none"]
Slopes = Literal["geometric", "linear"]
_NORMS = ("simple_rms", "rms", "layer", "none")
_POSITIONS = ("mix", "lrpe_d", "lrpe", "decay", "none")

# of the released language models
CHANNELS_PER_HEAD = 128
INIT_STD = 0.02
EPS = 1e-6


class TransNormer(Mixer):
    """O = SRMSNorm(sum_t a_st v_t) * U, a_st = q_s^T k_t lambda^(s - t) cos(theta (s - t)).

    The defaults are the paper's layer. Decays are constants of head and layer, strongest in the first layer
    and none in the last; frequencies are learned and belong to the first layer alone. Layers learn their
    places when a model calls `TransNormer.share`; one that stands alone is the first.

    | the paper's ablation | argument |
    |---|---|
    | LRPE with decay in the first layer, decay in the others | `positions="mix"`, the default |
    | LRPE with decay, LRPE, decay, in all layers | `positions="lrpe_d"`, "lrpe", "decay" |
    | without decay temperature | `layer_decay=False`: s_h in every layer |
    | without gate | `output_gate=False` |
    | activation of q and k: elu + 1, none | `feature_map="elu"`, "identity" |
    | RMSNorm, LayerNorm | `output_norm="rms"`, "layer" |

    The paper prints lambda = exp(-(8 h / H) (1 - l / L)), `slopes="linear"`, with which every head but a few
    forgets within a step or two. Its released code has the geometric slopes of ALiBi, the default, and
    reaches no decay in the last layer, as the paper's text asks; both slopes are here with that.

    When training starts, all matrices are normal with standard deviation 0.02, and theta_j = base^(-2j / d)
    for j = 0 .. d - 1 over the d channels of all heads: the released code. theta is marked as group
    "transition" without weight decay.

    Args:
        d_model: width d of the sequence, and of Q, K, V and U.
        n_heads: heads H. None is the largest number that divides `d_model` and leaves at least 128 channels
            to each head, or 1.
        positions: "mix", "lrpe_d", "lrpe", "decay" or "none", which is NormAttention of TransNormer.
        slopes: "geometric" or "linear", 8 h / H.
        layer_decay: whether decays weaken from layer to layer.
        lrpe_base: base of theta when training starts.
        feature_map: phi, "silu", "elu" (elu + 1) or "identity".
        output_norm: over all heads, "simple_rms", which has no parameters, "rms", "layer" or "none".
        output_gate: whether the normed output is multiplied by U.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, an `lrpe_base` below 1, or an unknown name of
            a variant.

    Source:
        TransNormerLLM (Qin and others, 2023), its improvements of the architecture, and their ablations;
        TransNormer (Qin and others, The Devil in Linear Transformer, 2022) for the norm.

    Example:
        >>> import torch
        >>> mixer = TransNormer(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]), torch.complex64)
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        positions: Positions = "mix",
        slopes: Slopes = "geometric",
        layer_decay: bool = True,
        lrpe_base: float = 10_000.0,
        feature_map: FeatureMap = "silu",
        output_norm: OutputNorm = "simple_rms",
        output_gate: bool = True,
    ) -> None:
        super().__init__(d_model)
        if positions not in _POSITIONS:
            raise unknown("`positions`", positions, _POSITIONS)
        if slopes not in ("geometric", "linear"):
            raise unknown("`slopes`", slopes, ["geometric", "linear"])
        if feature_map not in ("silu", "elu", "identity"):
            raise unknown("`feature_map`", feature_map, ["silu", "elu", "identity"])
        if output_norm not in _NORMS:
            raise unknown("`output_norm`", output_norm, _NORMS)
        if lrpe_base < 1:
            raise ValueError(f"`lrpe_base` must be at least 1; got {lrpe_base}. The paper's is 10000.")
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads)
        self.positions, self.slopes, self.layer_decay = positions, slopes, layer_decay
        self.layer, self.n_layers = 0, 1

        self.phi = feature_maps.build(feature_map, self.d_head)
        self.q = _projection(d_model)
        self.k = _projection(d_model)
        self.v = _projection(d_model)
        self.gate = _projection(d_model) if output_gate else None
        self.out = _projection(d_model)
        self.theta: nn.Parameter | None = None
        if positions in ("mix", "lrpe_d", "lrpe"):
            theta = lrpe_base ** (-2 * torch.arange(d_model) / d_model)
            self.theta = nn.Parameter(theta.unflatten(0, (self.n_heads, self.d_head)))
            mark(self, "theta", group="transition", weight_decay=False)
            self.keep_float32("theta")
        self.norm: nn.Module
        if output_norm == "simple_rms":
            self.norm = nn.RMSNorm(d_model, eps=EPS, elementwise_affine=False)
        else:
            self.norm = make_norm(output_norm, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor]:
        """Mix `x` over time; see `Mixer.forward`. The state is (b, h, dk, dv), complex with theta."""
        self.check_input(x, reset, state)
        q, k = self._queries_and_keys(x)
        v = self.v(x).unflatten(-1, (self.n_heads, self.d_head))
        o, state = gate_loop(q, k, v, *self._gates(), state=state, reset=reset)
        o = self.norm(o.flatten(-2))
        return self.out(o if self.gate is None else o * self.gate(x)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Zeros (batch, h, dk, dv): complex in layers with theta, else real."""
        dtype = self._state_dtype() if self.theta is None else self._state_dtype().to_complex()
        device = self.q.weight.device if device is None else device
        return torch.zeros(batch, self.n_heads, self.d_head, self.d_head, dtype=dtype, device=device)

    @property
    def state_size(self) -> int:
        """Elements of the state: d_model times the channels of a head, counting a complex number once."""
        return self.d_model * self.d_head

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """lambda and theta, constant in time: c = d_model; see `Mixer.transitions`."""
        log_decay, phase = self._gates()
        if log_decay is None:
            log_decay = torch.zeros(self.n_heads, dtype=self._state_dtype(), device=x.device)
        return Transitions.of_heads(log_decay[:, None].expand(-1, self.d_head), phase)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over heads of |a_st|."""
        return gate_loop_matrix(*self._queries_and_keys(x), *self._gates(), reset=reset).abs().mean(1)

    @classmethod
    def share(cls, layers: "Sequence[TransNormer]") -> None:
        """Tell each layer its place in the stack; with `positions="mix"`, the first alone keeps theta."""
        for layer, mixer in enumerate(layers):
            mixer.layer, mixer.n_layers = layer, len(layers)
            if mixer.positions == "mix" and layer > 0:
                mixer.theta = None

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = (self.n_heads, self.d_head)
        return self.phi(self.q(x).unflatten(-1, heads)), self.phi(self.k(x).unflatten(-1, heads))

    def _gates(self) -> tuple[Tensor | None, Tensor | None]:
        """log lambda (h,) and theta (h, dk); None where there is no decay, and where there are no phases."""
        dtype = self._state_dtype()
        phase = None if self.theta is None else self.theta.to(dtype)
        if self.positions in ("lrpe", "none"):
            return None, phase
        share = torch.arange(1, self.n_heads + 1, dtype=dtype, device=self.q.weight.device) / self.n_heads
        slope = 2.0 ** (-8 * share) if self.slopes == "geometric" else 8 * share
        fades = self.layer_decay and self.n_layers > 1
        return -slope * (1 - self.layer / (self.n_layers - 1) if fades else 1), phase


def _projection(d_model: int) -> nn.Linear:
    linear = nn.Linear(d_model, d_model, bias=False)
    nn.init.normal_(linear.weight, std=INIT_STD)
    return linear
