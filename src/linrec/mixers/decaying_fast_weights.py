"""Fine-Tuning Pre-trained Transformers into Decaying Fast Weights (Mao, 2022).

    q_t = W_q x_t     k_t = W_k x_t     v_t = W_v x_t
    f_t = sigmoid(W_f x_t + b_f)        z_t = sigmoid(W_z x_t + b_z)
    S_t = (f_t^T z_t) * S_{t-1} + k_t^T v_t
    y_t = q_t S_t

x is the input, t time, and * the product of entries; vectors are rows. Of a head, q is the query, k the key,
v the value, S the fast weights, and y the output; f is the decay of key channels, and z the decay of value
channels. Queries and keys have no feature map, and nothing is normalised. Heads side by side are projected by
W_o.
"""

from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from linrec.nn import feature_maps
from linrec.nn.fast_weights import fast_weights, fast_weights_matrix
from linrec.nn.gates import GateLinear, spread
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.ops.gate_loop import gate_loop
from linrec.ops.inspection import note
from linrec.rules import choice, require

__all__ = ["DecayingFastWeights"]

GateStart: TypeAlias = float | Literal["uniform"] | None

Decay = Literal["matrix", "key", "none"]

# every entry of a head's fast weights is a channel of its own, kept for every step
CHANNELS_PER_HEAD = 16


class DecayingFastWeights(Mixer):
    """S_t = (f_t^T z_t) * S_{t-1} + k_t^T v_t, y_t = q_t S_t: each entry of S has a decay of its own.

    The defaults are the paper's decay rule. A decay of every entry is a recurrence of h dk dv channels, all
    kept for every step: memory grows as d_model dk for each step, which is why heads are small here.

    | the paper's comparison | argument |
    |---|---|
    | a feature map of other papers | `feature_map`, a name of `linrec.nn.feature_maps` |
    | the sum, without decay | `decay="none"`: S_t = S_{t-1} + k_t^T v_t |
    | not in the paper: key channels alone decay | `decay="key"`: z_t = 1, no more memory than GLA |

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 16 channels to
            each head, or 1.
        feature_map: name of the feature map of queries and keys.
        decay: "matrix", "key" or "none".
        gate_bias_init: initial b_f and b_z. "uniform" spreads the n gates of each projection uniformly in
            [1/n, 1 - 1/n] at x = 0, so that entries start with time scales of one to many steps. A number is
            the bias of all gates: with 4, entries decay by 0.96 per step at first. With None, torch's own
            bias, entries decay by 0.25 per step at first.
        bias: whether the projections of q, k, v and of the output have biases.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an unknown name of a variant, a feature map that
            turns its features, or `gate_bias_init` where nothing decays.

    Source:
        Mao, Fine-Tuning Pre-trained Transformers into Decaying Fast Weights (2022), its decay rule; the form
        of the two gates as in GLA (Yang and others, 2023), table 1. The released code is the recurrence
        alone. Its tests draw gates like "uniform" (Gu and others, 2020).

    Example:
        >>> import torch
        >>> mixer = DecayingFastWeights(64, n_heads=8)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 8, 8, 8]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        feature_map: str = "identity",
        decay: Decay = "matrix",
        gate_bias_init: GateStart = "uniform",
        bias: bool = True,
    ) -> None:
        super().__init__(d_model)
        require(
            decay != "none" or gate_bias_init in (None, "uniform"),
            f'`gate_bias_init` is of the gates that `decay="none"` does not have; got {gate_bias_init}. '
            'Leave it at "uniform".',
        )
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        of, cure = "decaying fast weights", 'The mixer "linear_attention" has it.'
        self.phi = feature_maps.build_without_phase(feature_map, self.d_head, of=of, cure=cure)

        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.recurrence = "scan" if decay == "matrix" else "gate_loop"
        self.f = self.z = None
        if decay != "none":
            self.f = transition_gate(d_model, self.n_heads * self.phi.d_features, gate_bias_init)
        if decay == "matrix":
            self.z = transition_gate(d_model, d_model, gate_bias_init)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S (b, h, dk, dv)."""
        heads = self.n_heads, self.d_head
        q, k, v = (linear(x).unflatten(-1, heads) for linear in (self.q, self.k, self.v))
        q, k = self.phi(q), self.phi(k)
        log_f, log_z = (
            None if gate is None else functional.logsigmoid(gate(x)).unflatten(-1, (self.n_heads, -1))
            for gate in (self.f, self.z)
        )
        if log_f is None or log_z is None:
            y, state = gate_loop(q, k, v, log_f, state=state, reset=reset)
        else:
            note(q=q, k=k, log_f=log_f, log_z=log_z)
            y, state = fast_weights(q, k, v, log_f, log_z, state=state, reset=reset)
            y = y.to(x.dtype)
        return self.out(y.flatten(2)), state

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor | None:
        """Return the mean over heads and value channels of the magnitudes of the weights of v."""
        if self.z is None:
            return super().token_mixing(x, reset=reset)
        _, notes = self._memory(x, reset)
        q, k, log_f, log_z = (notes[name] for name in ("q", "k", "log_f", "log_z"))
        return fast_weights_matrix(q, k, log_f, log_z, reset=reset)


def transition_gate(d_in: int, d_out: int, gate_bias_init: GateStart = None) -> GateLinear:
    """Return the projection whose sigmoid is a decay, of group "transition" without weight decay.

    The initial bias is "uniform" for gates uniform in [1/d_out, 1 - 1/d_out] at x = 0, a number for all
    gates, or None for torch's own.
    """
    gate = mark(GateLinear(d_in, d_out))
    if isinstance(gate_bias_init, str):
        choice(("uniform",), gate_bias_init=gate_bias_init)
        spread(gate, None)
    elif gate_bias_init is not None:
        nn.init.constant_(gate.bias, gate_bias_init)
    return gate
