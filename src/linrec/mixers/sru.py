"""SRU: Simple Recurrent Units for Highly Parallelizable Recurrence (Lei, Zhang, Wang, Dai and Artzi, 2018).

    f_t = sigmoid(W_f x_t + v_f * c_{t-1} + b_f)
    c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t)
    r_t = sigmoid(W_r x_t + v_r * c_{t-1} + b_r)
    h_t = r_t * c_t + (1 - r_t) * x_t alpha

x input, f forget gate, c state, r reset gate of the highway connection, h output, alpha a constant that keeps
the variance, t time, * the product of channels. v_f and v_r are vectors.

f_t sees c_{t-1}, channel by channel, so steps run one by one: the recurrence is not linear. Without v, the
recurrence is linear, and `scan` computes it.
"""

import math

import torch
from torch import Tensor, nn

from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.nn.gates import Gate, GateLinear
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.parameters import mark
from linrec.ops.inspection import elementwise_mixing, note
from linrec.ops.scan import scan
from linrec.rules import require

__all__ = ["SRU"]

# a gate rounds to 0 or 1 long before this bound, and exp does not overflow yet
LARGEST_BIAS = 88


class SRU(Mixer):
    """c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t), h_t = r_t * c_t + (1 - r_t) * x_t alpha, gates of x and c.

    All projections are computed for all steps at once. The rest is a loop over time in plain torch, with a
    few operations on channels per step. Only the forget gate is in the loop, since r_t does not act on the
    state.

    | the paper's ablation | argument |
    |---|---|
    | without v * c: gates of the input alone, by `scan` | `recurrent_gates=False` |
    | without the highway connection: h_t = c_t | `highway=False` |
    | without scaling: alpha = 1 | `scale=False` |

    The released code calls the highway connection a skip term. Without it, r_t still gates the output there,
    h_t = r_t * c_t, which is `highway=False, output_gate=True`.

    When training starts, W is uniform with variance 1 / d_model; W_f and W_r have half of that, and v_f and
    v_r are uniform with variance 1/2, as in the released code; b_f is zero and b_r the `highway_bias`, by
    which alpha = sqrt(1 + 2 exp(b_r)). W_f, b_f and v_f are marked as group "transition" without weight
    decay.

    Args:
        d_model: width of the sequence and of the state.
        recurrent_gates: whether there are v_f and v_r.
        highway: whether the input is added, by 1 - r_t.
        output_gate: whether h_t = r_t * c_t without the highway connection; else h_t = c_t.
        highway_bias: b_r when training starts. Below zero, deep stacks start near the identity.
        scale: whether there is an alpha.
        refine: whether f has a refine gate, which sees x_t alone; see `linrec.nn.Gate`.
        uniform_init: whether f starts uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: a `highway_bias` that no gate tells from 0 or 1, or `output_gate` beside `highway`.

    Source:
        SRU (Lei and others, 2018), its architecture and its initialisation; refine gate and uniform
        initialisation: Gu and others (2020).

    Example:
        >>> mixer = SRU(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        recurrent_gates: bool = True,
        highway: bool = True,
        output_gate: bool = False,
        highway_bias: float = 0.0,
        scale: bool = True,
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        require(
            abs(highway_bias) <= LARGEST_BIAS,
            f"`highway_bias` must be within +-{LARGEST_BIAS}, where sigmoid(b_r) is 0 or 1 in single "
            f"precision; got {highway_bias}. The released code's is 0.",
        )
        require(
            not (highway and output_gate),
            "`output_gate` needs `highway=False`: the highway connection has the gate already.",
        )
        self.highway = highway
        bound = math.sqrt(3 / d_model)
        self.W = nn.Linear(d_model, d_model, bias=False)
        nn.init.uniform_(self.W.weight, -bound, bound)
        self.f = Gate(d_model, d_model, refine=refine, uniform_init=uniform_init)
        # a gate of x and of c: each has half of the variance
        nn.init.uniform_(self.f.f.weight, -bound / math.sqrt(2), bound / math.sqrt(2))
        if not uniform_init:
            nn.init.zeros_(self.f.f.bias)
        self.v_f = _vector(d_model) if recurrent_gates else None
        if self.v_f is not None:
            mark(self, "v_f")
        self.r = GateLinear(d_model, d_model) if highway or output_gate else None
        if self.r is not None:
            nn.init.uniform_(self.r.weight, -bound / math.sqrt(2), bound / math.sqrt(2))
            nn.init.constant_(self.r.bias, highway_bias)
        self.v_r = _vector(d_model) if recurrent_gates and self.r is not None else None
        self.alpha = math.sqrt(1 + 2 * math.exp(highway_bias)) if scale else 1.0

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h, and c (b, d_model)."""
        f, refinement = self.f.logits(x)
        Wx = self.W(x).to(f.dtype)
        if self.v_f is None:
            f, rest = self.f.of_logits(f, refinement)
            c, state = scan(f, rest * Wx, state=state, reset=reset)
            # no gate sees c_{t-1}
            before = c
        else:
            f, c, before, state = self._loop(f, refinement, Wx, self.v_f, state, reset)
        note(f=f)
        if self.r is None:
            return c.to(x.dtype), state
        r = self.r(x)
        if self.v_r is not None:
            r = r + self.v_r * before
        h = torch.sigmoid(r) * c
        if self.highway:
            h = h + torch.sigmoid(-r) * (self.alpha * x)
        return h.to(x.dtype), state

    def _loop(
        self, f: Tensor, refinement: Tensor | None, Wx: Tensor, v_f: Tensor, c: State, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return f_t, c_t and c_{t-1} of all steps, (b, t, d_model), and the last c, from logits of f."""
        c = self.init_state(f.shape[0], device=f.device) if c is None else c.to(f.dtype)

        def step(state: Tensors, f: Tensor, refinement: Tensor | None, Wx: Tensor) -> Step:
            (before,) = state
            f, rest = self.f.of_logits(torch.addcmul(f, v_f, before), refinement)
            c = torch.addcmul(rest * Wx, f, before)
            return (c,), (f, c, before)

        (c,), (f, cells, before) = step_by_step("sru", step, [c], [f, refinement, Wx], reset=reset)
        return f, cells, before, c

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_model)."""
        return scan.empty_state(batch, self.d_model, **self.factory_kwargs(device))

    def transitions(self, x: Tensor) -> Transitions:
        """Return f_t, also where a loop computes it, which is no operator."""
        _, notes = self._memory(x, None)
        return Transitions(notes["f"], None)

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of the factors of W x in c, for the gates of this `x`."""
        _, notes = self._memory(x, reset)
        return elementwise_mixing(notes["f"], 1 - notes["f"], x, reset)


def _vector(d_model: int) -> nn.Parameter:
    """v, uniform with variance 1/2."""
    return nn.Parameter(torch.empty(d_model).uniform_(-math.sqrt(1.5), math.sqrt(1.5)))
