"""Linear attention: Transformers are RNNs (Katharopoulos, Vyas, Pappas and Fleuret, 2020).

    Q = x W_Q     K = x W_K     V = x W_V                                (2)
    phi(x) = elu(x) + 1                                                  (7)
    s_i = s_{i-1} + phi(k_i) v_i^T                                      (18)
    z_i = z_{i-1} + phi(k_i)                                            (19)
    y_i = phi(q_i)^T s_i / (phi(q_i)^T z_i)                             (20)

x input, q query, k key, v value of a head, phi feature map, s attention memory, z normaliser memory, y output
of a head, i time. Heads side by side are projected by W_O, as in the Transformer. With rotary positions,
pairs of m features, read as complex numbers, turn by theta_j = base^(-2j/m) per step, in s and not in z:

    s_i = e^(i theta) s_{i-1} + conj(phi(k_i)) v_i^T          RoFormer (19)

Where features are exponentials, phi(k) = c exp(e), s and z are kept times exp(-m_i), with the largest
exponent so far, m_i = max(m_{i-1}, e_i), of each feature. y does not depend on m:

    s_i = exp(m_{i-1} - m_i) s_{i-1} + c_i exp(e_i - m_i) v_i^T
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.nn import feature_maps
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import make_norm
from linrec.nn.running_maximum import running_maximum
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.gate_loop import gate_loop, normalized_gate_loop

__all__ = ["LinearAttention", "RotaryState", "ScaledState"]

Normalization = Literal["running", "layer", "rms", "none"]
Positions = Literal["none", "rotary"]

# of the paper's image models: 8 heads in a width of 256
CHANNELS_PER_HEAD = 32


class RotaryState(NamedTuple):
    """What linear attention with rotary positions carries from one piece of a sequence to the next.

    Attributes:
        s: attention memory (b, h, m / 2, dv), complex.
        z: normaliser memory (b, h, m, 1), real; None without a running normaliser.
    """

    s: Tensor
    z: Tensor | None


class ScaledState(NamedTuple):
    """The state of linear attention with exponential features and a running normaliser.

    Attributes:
        sums: s with z as its last column (b, h, m, dv + 1), or a `RotaryState`; both times exp(-largest).
        largest: the largest exponent so far of each feature (b, h, m), or of each pair of features that turns
            (b, h, m / 2); -inf at the start.
    """

    sums: State
    largest: Tensor


class LinearAttention(Mixer):
    """y_i = phi(q_i)^T s_i / (phi(q_i)^T z_i), s and z running sums of phi(k) v^T and phi(k) (eq. 18 to 20).

    The defaults are the paper's layer. Other papers are other feature maps (`linrec.nn.feature_maps`) and
    normalisations:

    | paper | arguments |
    |---|---|
    | NormAttention of TransNormer (Qin and others, 2022) | `feature_map="identity", normalization="rms"` |
    | Performer (Choromanski and others, 2021) | `feature_map="performer"` |
    | cosFormer (Qin and others, 2022) | `feature_map="cosformer"`, M is `max_length` |
    | RoFormer (Su and others, 2021), section 3.3 | `positions="rotary"` |
    | DPFP (Schlag and others, 2021), without their delta rule | `feature_map="dpfp"`, `nu` |

    The paper's model adds positions to its inputs. A model that does not, as those of linrec, knows of order
    by the causal sums alone, unless `positions` or the feature map tells it.

    Random features are redrawn by `mixer.phi.redraw()`, between sequences.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 32 channels to
            each head, or 1.
        feature_map: the name of phi.
        n_features: random directions, of the random feature maps; None is its default, also for the next.
        orthogonal: whether these are orthogonal in blocks.
        nu: shifts of "dpfp".
        max_length: M of "cosformer", in steps.
        normalization: "running" divides by phi(q)^T z; "layer" or "rms" have a norm over all heads in place
            of that; "none" has nothing. "running" needs weights that are not negative, which "identity" does
            not have.
        positions: "none", or "rotary".
        rotary_base: base of the phases of rotary positions.
        floor: the smallest magnitude of phi(q)^T z. Rectified features of few channels vanish together now
            and then; a larger floor keeps gradients small there. Sums of exponential features are over their
            largest term, which makes those of "performer" at least 1 / m.
        bias: whether the projections have biases, as they have in the paper's code.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an unknown name of a variant or argument,
            "running" with weights that may be negative, a `floor` that is not positive, or rotary positions
            of an odd number of features, of features that turn already, or of a base below 1.

    Source:
        Transformers are RNNs (Katharopoulos and others, 2020), sections 3.2 to 3.4.

    Example:
        >>> import torch
        >>> mixer = LinearAttention(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 17]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        feature_map: str = "elu",
        n_features: int | None = None,
        orthogonal: bool | None = None,
        nu: int | None = None,
        max_length: int | None = None,
        normalization: Normalization = "running",
        positions: Positions = "none",
        rotary_base: float = 10_000.0,
        floor: float = 1e-6,
        bias: bool = True,
    ) -> None:
        super().__init__(d_model)
        if normalization not in ("running", "layer", "rms", "none"):
            raise unknown("`normalization`", normalization, ["running", "layer", "rms", "none"])
        if positions not in ("none", "rotary"):
            raise unknown("`positions`", positions, ["none", "rotary"])
        if rotary_base < 1:
            raise ValueError(f"`rotary_base` must be at least 1; got {rotary_base}. RoFormer's is 10000.")
        if not floor > 0:
            raise ValueError(f"`floor` must be positive; got {floor}. It keeps a sum from being zero.")
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads)
        features = {"n_features": n_features, "orthogonal": orthogonal, "nu": nu, "max_length": max_length}
        given = {name: value for name, value in features.items() if value is not None}
        self.phi = feature_maps.build(feature_map, self.d_head, **given)
        if normalization == "running" and not self.phi.positive:
            raise ValueError(
                '`normalization="running"` divides by a sum of weights, which must not be negative; those of '
                f'`feature_map="{feature_map}"` may be. Pass `normalization="rms"`.'
            )
        self.is_rotary, self.rotary_base = positions == "rotary", rotary_base
        if self.is_rotary and (self.phi.phase is not None or self.phi.d_features % 2):
            turning = "" if self.phi.phase is None else ", which it turns itself"
            raise ValueError(
                f'`positions="rotary"` turns pairs of features; `feature_map="{feature_map}"` has '
                f"{self.phi.d_features}{turning}. Choose an even number of channels per head and a map that "
                'does not turn, or `positions="none"`.'
            )
        self.is_running, self.floor = normalization == "running", floor
        self.is_scaled = self.is_running and self.phi.exponential

        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.norm = make_norm("none" if normalization == "running" else normalization, d_model)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Mix `x` over time; see `Mixer.forward`.

        The state (b, h, m, dv + 1) is s, its last column z; with rotary positions, a `RotaryState`; with
        exponential features and a running normaliser, a `ScaledState` of one of these.
        """
        self.check_input(x, reset, state)
        v = self.v(x).unflatten(-1, (self.n_heads, self.d_head))
        y, state = self._attend(x, v, state, reset)
        return self.out(self.norm(y.flatten(-2).to(x.dtype))), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Zeros: (batch, h, m, dv + 1), or (batch, h, m, dv) without z; or a `RotaryState` of zeros.

        With exponential features and a running normaliser, a `ScaledState` of them, and of -inf.
        """
        real = self._state_dtype()
        device = self.q.weight.device if device is None else device
        heads, m = (batch, self.n_heads), self.phi.d_features
        if self.is_rotary:
            s = torch.zeros((*heads, m // 2, self.d_head), dtype=real.to_complex(), device=device)
            z = torch.zeros((*heads, m, 1), dtype=real, device=device) if self.is_running else None
            sums: State = RotaryState(s, z)
        else:
            shape = (*heads, m, self.d_head + self.is_running)
            dtype = real if self.phi.phase is None else real.to_complex()
            sums = torch.zeros(shape, dtype=dtype, device=device)
        if not self.is_scaled:
            return sums
        width = m // (1 + self.is_rotary)
        return ScaledState(sums, torch.full((*heads, width), -torch.inf, dtype=real, device=device))

    @property
    def state_size(self) -> int:
        """Elements of s, h m dv for m features, of z, h m, and of the largest exponents, h m.

        A complex number counts once, and so does the exponent of two features that turn together.
        """
        m = self.phi.d_features
        each = m // (1 + self.is_rotary)
        return self.n_heads * (each * self.d_head + m * self.is_running + each * self.is_scaled)

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions | None:
        """Magnitudes of 1 and the phases of s, c = h m or h m / 2; None where nothing turns."""
        phase = self._phase(x)
        if phase is None:
            return None
        phase = phase.flatten()
        return Transitions(torch.ones_like(phase), phase)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over heads of |phi(Q) phi(K)^T|, over its sums with "running", which V is multiplied by."""
        # what attention makes of the identity is the matrix
        identity = torch.eye(x.shape[1], dtype=self.v.weight.dtype, device=x.device)[:, None]
        shares, _ = self._attend(x, identity.expand(len(x), -1, self.n_heads, -1), None, reset)
        return shares.abs().mean(2)

    def _attend(self, x: Tensor, v: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        q, k = (linear(x).unflatten(-1, (self.n_heads, self.d_head)) for linear in (self.q, self.k))
        if self.is_scaled:
            # the largest exponent so far is that of all parts
            refuse_split_time("linear_attention with exponential features")
            start = self.init_state(len(x), device=x.device) if state is None else state
            # without a state, values of any width may be summed
            sums, before = None if state is None else start.sums, start.largest
            q, k, log_fade, largest = self._scaled(q, k, before, reset)
            y, sums = self._recall(q, k, v, log_fade, self._phase(x), sums, reset)
            return y, ScaledState(sums, largest)
        q = self.phi.queries(q) if self.is_running else self.phi(q)
        return self._recall(q, self.phi(k), v, None, self._phase(x), state, reset)

    def _scaled(
        self, q: Tensor, k: Tensor, before: Tensor, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """phi(q) exp(m_i) over its largest factor, phi(k) exp(-m_i), m_{i-1} - m_i, and the last m."""
        (of_q, log_q), (of_k, log_k) = self.phi.logarithms(q), self.phi.logarithms(k)
        # features that turn together fade together
        pair = 1 + self.is_rotary
        # no gradient passes m, which cancels
        m = running_maximum(log_k.unflatten(-1, (-1, pair)).amax(-1), before, reset=reset)
        earlier, m, last = m[:, :-1], m[:, 1:], m[:, -1].clone()
        if reset is not None:
            earlier = earlier.masked_fill(reset[..., None, None], -torch.inf)
        each = m.repeat_interleave(pair, -1)
        log_q = log_q + each
        log_q = log_q - log_q.detach().amax(-1, keepdim=True)
        return (of_q * log_q.exp()).to(q), (of_k * (log_k - each).exp()).to(k), earlier - m, last

    def _recall(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_fade: Tensor | None,
        phase: Tensor | None,
        state: State,
        reset: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Read the running sums with the features of queries; `log_fade` rescales the sums at every step."""
        if self.is_rotary:
            return self._recall_rotary(q, k, v, log_fade, phase, state, reset)
        if not self.is_running:
            return gate_loop(q, k, v.to(q), phase=phase, state=state, reset=reset)
        return normalized_gate_loop(
            q, k, v.to(q), log_fade, phase, floor=self.floor, state=state, reset=reset
        )

    def _recall_rotary(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_fade: Tensor | None,
        phase: Tensor | None,
        state: State,
        reset: Tensor | None,
    ) -> tuple[Tensor, RotaryState]:
        q, k, v = (part.to(self._state_dtype()) for part in (q, k, v))
        s, z = (None, None) if state is None else state
        pairs_q, pairs_k = (torch.view_as_complex(part.unflatten(-1, (-1, 2))) for part in (q, k))
        y, s = gate_loop(pairs_q, pairs_k.conj(), v, log_fade, phase, state=s, reset=reset)
        if self.is_running:
            each = None if log_fade is None else log_fade.repeat_interleave(2, -1)
            # what does not turn is not negative
            total, z = gate_loop(q, k, torch.ones_like(q[..., :1]), each, state=z, reset=reset)
            y = y / total.clamp(min=self.floor)
        return y, RotaryState(s, z)

    def _phase(self, x: Tensor) -> Tensor | None:
        """Radians per step (h, m / 2) with rotary positions, else (h, m), or None where nothing turns."""
        dtype, m = self._state_dtype(), self.phi.d_features
        if self.is_rotary:
            pair = torch.arange(0, m, 2, dtype=dtype, device=x.device)
            return (self.rotary_base ** (-pair / m)).expand(self.n_heads, -1)
        if self.phi.phase is None:
            return None
        return torch.full((self.n_heads, m), self.phi.phase, dtype=dtype, device=x.device)
