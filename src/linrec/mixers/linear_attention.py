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

Without a causal mask, s and z are sums over the whole sequence:

    y_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j))  (5)
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn import feature_maps
from linrec.nn.documents import largest_of_documents, product_totals
from linrec.nn.head_sizes import heads_of, split_width
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import make_norm
from linrec.nn.projections import projected
from linrec.nn.rotary import Rotary, rotary_gate_loop
from linrec.nn.running_maximum import maxima_around_steps
from linrec.ops.core.precision import wide
from linrec.ops.gate_loop import gate_loop, normalized_gate_loop
from linrec.ops.inspection import note
from linrec.rules import at_least, positive, require

__all__ = ["LinearAttention", "RotaryState", "ScaledState"]

Normalization = Literal["running", "layer", "rms", "none"]
Positions = Literal["none", "rotary"]

# of the paper's image models: 8 heads in a width of 256
CHANNELS_PER_HEAD = 32


class RotaryState(NamedTuple):
    """The state of linear attention with rotary positions between two pieces of a sequence.

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
    | Performer, hyperbolic features (lemma 1) | `feature_map="performer", hyperbolic=True` |
    | Performer-ReLU | `feature_map="arc_cosine", orthogonal=True, epsilon=0.001` |
    | Performer-ReLU, no random directions | `feature_map="relu", epsilon=0.001` |
    | cosFormer (Qin and others, 2022) | `feature_map="cosformer"`, M is `max_length` |
    | RoFormer (Su and others, 2021), section 3.3 | `positions="rotary"` |
    | DPFP (Schlag and others, 2021), without their delta rule | `feature_map="dpfp"`, `nu` |
    | BASED (Arora and others, 2024) | `feature_map="taylor"`, `d_qk` = 16 `n_heads`, `bias=False` |
    | T2R (Kasai and others, 2021) | `feature_map="learned", n_features=32` |
    | EcoFormer (Liu and others, 2022) | `feature_map="hashed", shared_qk=True, causal=False, bias=False` |

    The paper's model adds positions to its inputs. Models of linrec do not. They see the order of steps by
    the causal sums alone, unless `positions` or the feature map encodes positions.

    Random features are redrawn by `mixer.phi.redraw()`, and the bits of "hashed" are learned by
    `mixer.phi.fit(mixer.q(x).unflatten(-1, (mixer.n_heads, -1)))`, both between sequences. T2R takes queries,
    keys and values from a trained Transformer, and divides queries by sqrt(d) before phi; put the factor into
    W_Q. EcoFormer's released code has its own v_i in place of the sum of all v_j in the constant part of
    the numerator, so that its weights do not add up to 1; those of its paper, and here, do.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 32 channels to
            each head, or 1.
        d_qk: width of queries and keys over all heads. None is `d_model`, the width of values.
        shared_qk: whether keys are the queries.
        feature_map: the name of phi.
        n_features: directions of the random feature maps, features of "learned", or bits of "hashed". None is
            the feature map's default, as in the arguments below.
        n_anchors: anchors of "hashed".
        orthogonal: whether the directions are orthogonal in blocks.
        hyperbolic: whether "performer" has each direction with both signs: twice the features, and less
            variance.
        epsilon: added to each feature of "relu" and "arc_cosine".
        nu: shifts of "dpfp".
        max_length: M of "cosformer", in steps: the length of the longest sequence, 4096 by default. Keys
            more than M steps back get negative weights. The released code takes the length of each input,
            which no causal layer knows.
        normalization: "running" divides by phi(q)^T z; "layer" or "rms" have a norm over all heads in place
            of that; "none" has neither. "running" needs weights that are not negative; the weights of
            "identity" may be negative.
        positions: "none", or "rotary".
        rotary_base: base of the phases of rotary positions.
        floor: the smallest magnitude of phi(q)^T z. Rectified features of few channels vanish together now
            and then; a larger floor keeps gradients small there. Sums of exponential features are divided by
            their largest term, so that sums of "performer" are at least 1 / m.
        bias: whether the projections have biases, as they have in the paper's code.
        causal: whether steps see the past alone. False is for encoders: a step sees its whole document, from
            one reset to the next, and there is no state.

    Raises:
        ValueError: `n_heads` that does not divide `d_model` and `d_qk`, or an unknown name of a variant or
            argument.
            "running" with weights that may be negative, or a `floor` that is not positive. Rotary positions
            with an odd number of features, with features that turn already, or with a base below 1.

    Source:
        Transformers are RNNs (Katharopoulos and others, 2020), sections 3.2 to 3.4.

    Example:
        >>> mixer = LinearAttention(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 17]))
    """

    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        shared_qk: bool = False,
        feature_map: str = "elu",
        n_features: int | None = None,
        orthogonal: bool | None = None,
        hyperbolic: bool | None = None,
        epsilon: float | None = None,
        nu: int | None = None,
        max_length: int | None = None,
        n_anchors: int | None = None,
        normalization: Normalization = "running",
        positions: Positions = "none",
        rotary_base: float = 10_000.0,
        floor: float = 1e-6,
        bias: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, rotary_base=rotary_base, cure="RoFormer's is 10000.")
        positive(floor=floor, cure="It keeps a sum from being zero.")
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        d_qk = d_model if d_qk is None else d_qk
        d_key = heads_of("d_qk", d_qk, self.n_heads)
        features: dict[str, int | float | None] = {"n_features": n_features, "orthogonal": orthogonal}
        features |= {"hyperbolic": hyperbolic, "epsilon": epsilon, "nu": nu, "max_length": max_length}
        features |= {
            "n_anchors": n_anchors,
            "n_heads": self.n_heads if feature_map in feature_maps.PER_HEAD else None,
        }
        given = {name: value for name, value in features.items() if value is not None}
        self.phi = feature_maps.build(feature_map, d_key, **given)
        require(
            normalization != "running" or self.phi.positive,
            '`normalization="running"` divides by a sum of weights, which must not be negative; those of '
            f'`feature_map="{feature_map}"` may be. Pass `normalization="rms"`.',
        )
        turning = "" if self.phi.phase is None else ", which it turns itself"
        require(
            positions == "none" or (self.phi.phase is None and self.phi.d_features % 2 == 0),
            f'`positions="rotary"` turns pairs of features; `feature_map="{feature_map}"` has '
            f"{self.phi.d_features}{turning}. Choose an even number of channels per head and a map that "
            'does not turn, or `positions="none"`.',
        )
        self.rotary = Rotary(self.phi.d_features, base=rotary_base) if positions == "rotary" else None
        self.is_running, self.floor, self.causal = normalization == "running", floor, causal
        self.is_scaled = self.is_running and self.phi.exponential
        # features that turn together are one complex number
        self.d_turned = self.phi.d_features // 2 if self.rotary else self.phi.d_features
        if causal:
            has_z = self.is_running and self.rotary is None
            self.recurrence = "normalized_gate_loop" if has_z else "gate_loop"

        self.q = nn.Linear(d_model, d_qk, bias=bias)
        self.k = None if shared_qk else nn.Linear(d_model, d_qk, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.norm = make_norm("none" if normalization == "running" else normalization, d_model)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and s with z as its last column (b, h, m, dv + 1), or s alone without z.

        With rotary positions the state is a `RotaryState`, and with exponential features and a running
        normaliser a `ScaledState` of either.
        """
        q, k, v = projected(x, self.q, self.k, self.v)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in (q, q if k is None else k, v))
        if not self.causal:
            return self._whole(q, k, v, reset).to(x.dtype), None
        sums, log_fade, theta, like = state, None, None, self.factory_kwargs(x.device)
        if not self.is_scaled:
            q, k = self.phi.queries(q) if self.is_running else self.phi(q), self.phi(k)
        else:
            (c_q, e_q), (c_k, e_k) = self.phi.logarithms(q), self.phi.logarithms(k)
            if state is None:
                largest = torch.full((x.shape[0], self.n_heads, self.d_turned), -torch.inf, **like)
            else:
                sums, largest = state
            # features that turn together fade together
            together = self.phi.d_features // self.d_turned
            # no gradient passes m, which cancels
            e = e_k.unflatten(-1, (-1, together)).amax(-1)
            earlier, m, largest = maxima_around_steps(e, largest, reset=reset)
            log_fade, m = earlier - m, m.repeat_interleave(together, -1)
            e_q = e_q + m
            # the largest factor of a query cancels too
            e_q = e_q - e_q.detach().amax(-1, keepdim=True)
            q, k = (c_q * e_q.exp()).to(q), (c_k * (e_k - m).exp()).to(k)
        v = v.to(q)
        if self.phi.phase is not None:
            theta = torch.full((self.n_heads, self.phi.d_features), self.phi.phase, **like)
        if self.rotary is not None:
            s, z = (None, None) if sums is None else sums
            if self.is_running:
                fade_of_z = None if log_fade is None else log_fade.repeat_interleave(2, -1)
                total, z = gate_loop(q, k, torch.ones_like(q[..., :1]), fade_of_z, state=z, reset=reset)
                # features that do not turn are not negative
                total = total.clamp(min=self.floor)
                note(divisor=total)
            y, s = rotary_gate_loop(self.rotary, q, k, v, log_fade, state=s, reset=reset)
            y, sums = y / total if self.is_running else y, RotaryState(s, z)
        elif self.is_running:
            y, sums = normalized_gate_loop(
                q, k, v, log_fade, theta, floor=self.floor, state=sums, reset=reset
            )
        else:
            y, sums = gate_loop(q, k, v, phase=theta, state=sums, reset=reset)
        y = self.out(self.norm(y.flatten(-2).to(x.dtype)))
        return y, ScaledState(sums, largest) if self.is_scaled else sums

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, reset: Tensor | None) -> Tensor:
        """Return y of eq. 5, over each document."""
        if not self.is_scaled:
            q, k = self.phi.queries(q) if self.is_running else self.phi(q), self.phi(k)
        else:
            (c_q, e_q), (c_k, e_k) = self.phi.logarithms(q), self.phi.logarithms(k)
            e = e_k.detach().unflatten(-1, (self.d_turned, -1)).amax(-1)
            m = largest_of_documents(e, reset).repeat_interleave(self.phi.d_features // self.d_turned, -1)
            e_q = e_q + m
            q, k = c_q * (e_q - e_q.detach().amax(-1, keepdim=True)).exp(), c_k * (e_k - m).exp()
        step = torch.arange(q.shape[1], device=q.device)
        if self.phi.phase is not None:
            q, k = (by_cosines(part, self.phi.phase * step.to(wide(q).dtype)) for part in (q, k))
        z = product_totals(q, k, torch.ones_like(v[..., :1]), reset) if self.is_running else None
        if self.rotary is not None:
            q, k = self.rotary(step[None], q, k)
        y = product_totals(q, k, v, reset)
        if z is not None:
            y = y / torch.where(z < 0, z.clamp(max=-self.floor), z.clamp(min=self.floor))
        return self.out(self.norm(y.flatten(-2).to(v.dtype)))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, h, m, dv + 1), or (batch, h, m, dv) without z; or a `RotaryState` of zeros.

        With exponential features and a running normaliser, a `ScaledState` of them, and of -inf. None without
        `causal`.
        """
        if not self.causal:
            return None
        h, m, d, like = self.n_heads, self.phi.d_features, self.d_head, self.factory_kwargs(device)
        turns = self.factory_kwargs(device, is_complex=self.rotary is not None or self.phi.phase is not None)
        if self.rotary is not None:
            z = gate_loop.empty_state(batch, h, m, 1, **like) if self.is_running else None
            sums: State = RotaryState(gate_loop.empty_state(batch, h, m // 2, d, **turns), z)
        else:
            sums = gate_loop.empty_state(batch, h, m, d + self.is_running, **turns)
        if not self.is_scaled:
            return sums
        return ScaledState(sums, torch.full((batch, h, self.d_turned), -torch.inf, **like))

    def transitions(self, x: Tensor) -> Transitions | None:
        """Return magnitudes of 1 and the phases of s, without the factors of rescaled exponentials."""
        found = super().transitions(x)
        if found is None or found.phase is None:
            return None
        return Transitions(torch.ones_like(found.phase), found.phase)

    @property
    def is_causal(self) -> bool:
        """Whether steps see the past alone."""
        return self.causal


def by_cosines(x: Float[Tensor, "b t h m"], angle: Float[Tensor, "t"]) -> Float[Tensor, "b t h 2m"]:
    """Return [x cos, x sin]: products of two steps have the cosine of the difference of their angles."""
    turn = torch.stack([angle.cos(), angle.sin()], -1).to(x)[:, None, :, None]
    return (turn * x[:, :, :, None]).flatten(-2)
