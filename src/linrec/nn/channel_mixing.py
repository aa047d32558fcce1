"""Channel mixing: functions of every step alone, gated units, and RWKV's, which sees the step before."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.activations import ACTIVATIONS
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import orthogonal_linear, projected
from linrec.nn.token_shift import Place, TokenShift, ramp
from linrec.rules import at_least, choice, require

__all__ = [
    "GLU",
    "ChannelMixing",
    "FFNActivation",
    "FeedForward",
    "GLUActivation",
    "Output",
    "PositionWise",
    "RWKVChannelMixing",
    "make_channel_mixing",
]

FFNActivation = Literal["gelu", "squared_relu"]
GLUActivation = Literal["sigmoid", "silu", "gelu", "gelu_tanh", "identity"]
Output: TypeAlias = Literal["linear", "glu", "none"]
ChannelMixing: TypeAlias = Literal[
    "ffn", "squared_relu", "glu", "swiglu", "geglu", "geglu_tanh", "bilinear", "rwkv", "rwkv7", "none"
]
_ACTIVATIONS = {"ffn": "gelu", "squared_relu": "squared_relu"}
_GATES = {
    "glu": "sigmoid",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "bilinear": "identity",
}


class FeedForward(nn.Module):
    """y = W_2 f(W_1 x + b_1) + b_2; with f = GELU, the "simple FNN" of GateLoop's appendix C.

    Args:
        d_model: width of input and output.
        d_hidden: width between the two projections, `d_channel_mixing` in the paper's tables.
        activation: f, "gelu", or "squared_relu", which is ReLU(z)^2.
        bias: whether there are b_1 and b_2.

    Raises:
        ValueError: there is no such activation; the message names the nearest.

    Source:
        "squared_relu": So and others, Primer (2021).

    Example:
        >>> import torch
        >>> FeedForward(64, 128)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: FFNActivation = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        choice(FFNActivation, activation=activation)
        self.activation = activation
        self.up = nn.Linear(d_model, d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the function to `x` (..., d_model)."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))

    if TYPE_CHECKING:
        __call__ = forward


class GLU(nn.Module):
    """y = W_3 (f(W_1 x + b_1) * (W_2 x + b_2)) + b_3, the channel mixing of HGRN.

    | `activation` | f            | called   |
    |--------------|--------------|----------|
    | "sigmoid"    | Sigmoid      | GLU      |
    | "silu"       | SiLU         | SwiGLU   |
    | "gelu"       | GELU         | GEGLU    |
    | "gelu_tanh"  | GELU by tanh | GEGLU    |
    | "identity"   | none         | Bilinear |

    HGRN names the unit without a formula, so the default is the unit of that name. The authors' released
    language models have no activation, "identity"; their models of the Long Range Arena have SiLU.
    "gelu_tanh" is the approximation z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2, which Gemma has.

    Args:
        d_model: width of input and output.
        d_hidden: width of the product; HGRN's language models have 2 d_model.
        activation: f, of the gate.
        bias: whether there are b_1, b_2 and b_3.

    Raises:
        ValueError: there is no such activation; the message names the nearest.

    Source:
        Shazeer, GLU Variants Improve Transformer (2020), eq. 4 and 5, with biases; HGRN (Qin, Yang and Zhong,
        2023), section 3.1 and figure 1.

    Example:
        >>> import torch
        >>> GLU(64, 128)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    of_one_input = "gate", "up"

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: GLUActivation = "sigmoid", bias: bool = True
    ) -> None:
        super().__init__()
        choice(GLUActivation, activation=activation)
        self.activation = activation
        self.gate = nn.Linear(d_model, d_hidden, bias=bias)
        self.up = nn.Linear(d_model, d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the function to `x` (..., d_model)."""
        gate, up = projected(x, self.gate, self.up)
        return self.down(ACTIVATIONS[self.activation](gate) * up)

    if TYPE_CHECKING:
        __call__ = forward


class RWKVChannelMixing(Mixer):
    """y_t = sigmoid(r_t) * (W_v ReLU(k_t)^2), of mixtures of the current and the last token.

        r_t = W_r (x_t + (x_{t-1} - x_t) * mu_r)
        k_t = W_k (x_t + (x_{t-1} - x_t) * mu_k)

    It is a `Mixer`, since the last input is a state. `linrec.models.Block` takes it like any other channel
    mixing. It is the same in RWKV-4, 5 and 6; mu is 1 - mu of the paper of RWKV-4. RWKV-7 has no receptance.

    As in the released code of RWKV-5 and 6, mu_r and mu_k start at 1 - (i/d)^(1 - l/L), for channel i of d
    and layer l of L. W_k starts orthogonal, and W_r and W_v at zero, so that every output is zero at first.
    In the released code of RWKV-4, W_k is sqrt(d_hidden / d_model) times as large. Without receptance, mu_k
    starts at 1 - (i/d)^((1 - l/L)^4), and W_k uniform in +- 0.5 / sqrt(d), as in RWKV-7. Layers learn
    their places when a model calls `RWKVChannelMixing.share`; a layer that stands alone is the first of one.

    Args:
        d_model: width of input and output.
        d_hidden: width of k; the papers have 4 `d_model` in RWKV-4, 3.5 `d_model` in RWKV-5 and 6.
        token_shift: whether r and k see the input of the step before; without token shift, mu = 0, and there
            is no state.
        receptance: whether the output is multiplied by sigmoid(r).
        zero_init: whether W_r and W_v start at zero; else they are orthogonal too.

    Raises:
        ValueError: a `d_hidden` below 1.

    Source:
        RWKV (Peng and others, 2023), channel mixing; Eagle and Finch (Peng and others, 2024).

    Example:
        >>> import torch
        >>> y, last = RWKVChannelMixing(64, 256)(torch.zeros(2, 10, 64))
        >>> y.shape, last.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        token_shift: bool = True,
        receptance: bool = True,
        zero_init: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_hidden=d_hidden)
        first = 0.0 if zero_init else 1.0
        # of k and r
        self.shift = TokenShift(d_model, 2 if receptance else 1, present=token_shift)
        self.k = orthogonal_linear(d_model, d_hidden)
        if not receptance:
            nn.init.uniform_(self.k.weight, -0.5 / d_model**0.5, 0.5 / d_model**0.5)
        self.v = orthogonal_linear(d_hidden, d_model, gain=first)
        self.r = orthogonal_linear(d_model, d_model, gain=first) if receptance else None
        self.share([self])

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last input (b, d_model), or None without token shift."""
        mixed, last = self.shift(x, state, reset=reset)
        y = self.v(torch.relu(self.k(mixed[0])).square())
        return y if self.r is None else torch.sigmoid(self.r(mixed[1])) * y, last

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_model); None without token shift."""
        return self.shift.init_state(batch, **self.factory_kwargs(device))

    @classmethod
    def share(cls, layers: "Sequence[RWKVChannelMixing]") -> None:
        """Start mu of each layer from its place in the stack."""
        for layer, mixer in enumerate(layers):
            place = Place(layer, len(layers))
            power = place.height**4 if mixer.r is None else place.height
            mixer.shift.start([1 - ramp(mixer.d_model, power)] * mixer.shift.n)


class PositionWise(nn.Module):
    """o = W GELU(y) + b, where W mixes all outputs of all channels.

    | `output` | o |
    |---|---|
    | "linear" | W GELU(y) + b |
    | "glu" | the first half of W GELU(y) + b, times the sigmoid of the second half |
    | "none" | GELU(y) |

    Args:
        d_model: channels of o.
        output: "linear", "glu" or "none".
        n_outputs: outputs of each channel; y has n_outputs d_model channels.
        activation: whether there is the GELU.
    """

    def __init__(
        self, d_model: int, *, output: Output = "linear", n_outputs: int = 1, activation: bool = True
    ) -> None:
        super().__init__()
        choice(Output, output=output)
        require(
            n_outputs == 1 or output != "none",
            f'`n_outputs` must be 1 with `output="none"`; got {n_outputs}. Pass "linear" or "glu".',
        )
        self.output, self.activation = output, activation
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if output != "none":
            linear = nn.Linear(n_outputs * d_model, 2 * d_model if output == "glu" else d_model)
            self.weight, self.bias = linear.weight, linear.bias

    def forward(self, y: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_model"]:
        """Return o (..., d_model) of `y` (..., n_outputs d_model)."""
        o = functional.gelu(y) if self.activation else y
        if self.weight is not None:
            o = functional.linear(o, self.weight, self.bias)
        return functional.glu(o) if self.output == "glu" else o

    def extra_repr(self) -> str:
        """Return the form, which `print` shows."""
        return f"output={self.output!r}, activation={self.activation}"


def make_channel_mixing(
    kind: ChannelMixing, d_model: int, d_hidden: int, *, bias: bool = True
) -> nn.Module | None:
    """Return a `FeedForward`, a `GLU`, an `RWKVChannelMixing`, or None, by name.

    Args:
        kind: "ffn" and "squared_relu", which are a `FeedForward`; "glu", "swiglu", "geglu", "geglu_tanh" and
            "bilinear", which are a `GLU`; "rwkv"; "rwkv7", which is RWKV's without receptance; or "none".
        d_model: width of input and output.
        d_hidden: hidden width. A gated unit has three matrices of it, all others two.
        bias: whether the linear layers have biases; RWKV's have none.

    Raises:
        ValueError: there is no such kind; the message names the nearest.

    Example:
        >>> make_channel_mixing("swiglu", 64, 128).activation
        'silu'
    """
    if kind in _ACTIVATIONS:
        return FeedForward(d_model, d_hidden, activation=cast(FFNActivation, _ACTIVATIONS[kind]), bias=bias)
    if kind in ("rwkv", "rwkv7"):
        return RWKVChannelMixing(d_model, d_hidden, receptance=kind == "rwkv")
    if kind == "none":
        return None
    if kind not in _GATES:
        raise unknown("channel mixing", kind, [*_ACTIVATIONS, *_GATES, "rwkv", "rwkv7", "none"])
    return GLU(d_model, d_hidden, activation=cast(GLUActivation, _GATES[kind]), bias=bias)
