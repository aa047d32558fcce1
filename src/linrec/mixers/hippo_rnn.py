"""HiPPO-RNN: Recurrent Memory with Optimal Polynomial Projections (Gu, Dao, Ermon, Rudra and Ré, 2020).

    h_t = tau(h_{t-1}, [c_{t-1}, x_t])
    f_t = L_f h_t
    c_t = A_t c_{t-1} + B_t f_t
    tau(h, s) = (1 - g) * h + g * tanh(L_z [s, h])     g = sigmoid(L_g [s, h])
    y_t = h_t

x input, h hidden state, f signal to remember, c memory: N coefficients of f's past; A_t and B_t one step of
HiPPO's system, tau update of a gated RNN, g gate, L learned affine maps, y output, t time. f depends on the
memory nonlinearly, so steps run one by one.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.hippo import Discretization, discretize, matrices
from linrec.hippo.scaled import scaled_step
from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.nn.gates import Gate, GateLinear
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import affine_map
from linrec.ops.core.call import unhandled
from linrec.ops.core.precision import without_autocast
from linrec.rules import at_least, positive, require

__all__ = ["HiPPORNN", "HiPPOState"]

Measure = Literal["legs", "legt", "lagt"]
Variant = Literal["paper", "released"]


class HiPPOState(NamedTuple):
    """The state of a HiPPO-RNN.

    Args:
        h: (b, d_model), the hidden state.
        c: (b, d_memory, order), the memories.
        steps: (b, 1), how many steps the memories hold; None with a `window`, where steps do not differ.
    """

    h: Float[Tensor, "b d_model"]
    c: Float[Tensor, "b d_memory order"]
    steps: Float[Tensor, "b 1"] | None


class HiPPORNN(Mixer):
    """h_t = tau(h_{t-1}, [c_{t-1}, x_t]), c_t = A_t c_{t-1} + B_t L_f h_t: a gated RNN with a HiPPO memory.

    The arguments choose the memory:

    | measure | arguments | memory |
    |---|---|---|
    | LegS | the defaults | all of the past, however long: A_t = A / t |
    | LegT | `measure="legt"`, `window` | the last `window` steps |
    | LagT | `measure="lagt"`, `window` | the past, fading as e^(-age / (2 `window`)) |
    | LegS that does not scale | `measure="legs"`, `window` | the past, fading as e^(-age / `window`) |

    The paper's equations and the released code differ:

    | | order | L_f sees | L_z and L_g see |
    |---|---|---|---|
    | `variant="paper"` | h_t, then c_t | h_t | x_t, c_{t-1} and h_{t-1} |
    | `variant="released"` | c_t, then h_t | x_t and h_{t-1} | x_t and c_t |

    A and B are not learned. Weights start as in the released code: L_f is LeCun's uniform, L_g normal with
    variance 1 / its inputs, and each part of L_z, of x, c and h, is Xavier's normal. Biases are torch's own.
    The gate is marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence and of h.
        variant: "paper", the paper's equations, or "released", the released code.
        measure: "legs", "legt" or "lagt"; see `linrec.hippo.matrices`.
        order: coefficients of each memory, N. None is `d_model`, as in the released code.
        d_memory: signals that are remembered, the width of f.
        window: steps that the measure's unit of time takes; None for "legs" over all of the past.
        discretization: "bilinear", or "zoh" or "euler" with a `window`; see `linrec.hippo.discretize`.
        gate: whether there is g; without, h_t = tanh(L_z [s, h]).
        refine: whether g has a refine gate; see `linrec.nn.Gate`.
        uniform_init: whether g starts uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: an unknown name, a size below 1, or a `window` that is missing or not positive.

    Source:
        HiPPO (Gu, Dao, Ermon, Rudra and Ré, 2020), the figure and the appendix on the HiPPO-RNN; the released
        code is HazyResearch/hippo-code; refine gate and uniform initialisation: Gu and others (2020).

    Example:
        >>> mixer = HiPPORNN(16, order=8)
        >>> y, (h, c, steps) = mixer(torch.zeros(2, 10, 16))
        >>> y.shape, c.shape, steps.tolist()
        (torch.Size([2, 10, 16]), torch.Size([2, 1, 8]), [[10.0], [10.0]])
    """

    A: Tensor
    B: Tensor

    takes_turns = True

    def __init__(
        self,
        d_model: int,
        *,
        variant: Variant = "paper",
        measure: Measure = "legs",
        order: int | None = None,
        d_memory: int = 1,
        window: float | None = None,
        discretization: Discretization = "bilinear",
        gate: bool = True,
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, order=order, or_none=True, cure="None is `d_model`.")
        at_least(1, d_memory=d_memory)
        positive(window=window, or_none=True, cure="It is a number of steps.")
        require(
            window is not None or (measure, discretization) == ("legs", "bilinear"),
            f"`window` must be a number of steps with measure={measure!r} and discretization="
            f'{discretization!r}; got None. Without a window there is "legs" with "bilinear" steps.',
        )
        self.order, self.d_memory = d_model if order is None else order, d_memory
        self.measure, self.window, self.discretization = measure, window, discretization
        self.memory_first = variant == "released"

        sees = [d_model, d_memory * self.order] + ([] if self.memory_first else [d_model])
        self.seen = sum(sees)
        self.z = nn.Linear(self.seen, d_model)
        for part in self.z.weight.split(sees, 1):
            nn.init.xavier_normal_(part)
        self.g = Gate(self.seen, d_model, refine=refine, uniform_init=uniform_init) if gate else None
        for linear, _ in self._maps()[1:]:
            nn.init.normal_(linear.weight, std=self.seen**-0.5)
        self.f = nn.Linear(2 * d_model if self.memory_first else d_model, d_memory)
        nn.init.kaiming_uniform_(self.f.weight, nonlinearity="linear")
        self.add_constants(like=self.f.weight)
        # rounded to half precision they would be another system, which need not be stable
        self.keep_float32(*self.constants())

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, HiPPOState]:
        """Return h, and a `HiPPOState`."""
        h, c, steps = self.init_state(x.shape[0], device=x.device) if state is None else state
        dtype, d = c.dtype, self.d_model
        # L_z and the maps of the gate side by side, split into columns for x and for the rest
        maps = [affine_map(part, self.seen, x.device, kind=kind) for part, kind in self._maps()]
        L, b = (torch.cat([part.to(dtype) for part in parts]) for parts in zip(*maps, strict=True))
        L_x, L_rest = L[:, :d], L[:, d:].mT
        L_f, b_f = (
            part.to(dtype) for part in affine_map(self.f, 2 * d if self.memory_first else d, x.device)
        )

        def tau(h: Tensor, c: Tensor, s_x: Tensor) -> Tensor:
            s = c.flatten(1) if self.memory_first else torch.cat([c.flatten(1), h], -1)
            z, *logits = (s_x + s @ L_rest).split(d, -1)
            if self.g is None:
                return z.tanh()
            g, kept = self.g.of_logits(logits[0], logits[1] if len(logits) > 1 else None)
            return kept * h + g * z.tanh()

        def remember(c: Tensor, f: Tensor, steps: list[Tensor]) -> Tensor:
            if self.window is None:
                return scaled_step(c, f, steps[0][:, 0])
            return c @ self.A.mT + f[..., None] * self.B

        def step(state: Tensors, s_x: Tensor, x_t: Tensor) -> Step:
            h, c, *steps = state
            if self.memory_first:
                f = functional.linear(torch.cat([x_t, h], -1), L_f, b_f)
                c = remember(c, f, steps)
                h = tau(h, c, s_x)
            else:
                h = tau(h, c, s_x)
                c = remember(c, functional.linear(h, L_f, b_f), steps)
            return (h, c, *(k + 1 for k in steps)), (h,)

        past, inputs = (h, c) if steps is None else (h, c, steps), x.to(dtype)
        # rounding errors would be fed back
        with without_autocast(x.device.type):
            s_x = functional.linear(inputs, L_x, b)
        # handlers are for operators over time, not over coefficients
        with unhandled():
            (h, c, *held), (y,) = step_by_step("hippo_rnn", step, past, [s_x, inputs], reset=reset)
        return y.to(x.dtype), HiPPOState(h, c, held[0] if held else None)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> HiPPOState:
        """Return zeros (batch, d_model), (batch, d_memory, order), and (batch, 1) without a window."""
        kwargs = self.factory_kwargs(device)
        h = torch.zeros(batch, self.d_model, **kwargs)
        c = torch.zeros(batch, self.d_memory, self.order, **kwargs)
        return HiPPOState(h, c, torch.zeros(batch, 1, **kwargs) if self.window is None else None)

    def _maps(self) -> list[tuple[nn.Linear, type[nn.Linear]]]:
        """Return L_z and the maps of the gate, each with its class."""
        gates = [] if self.g is None else [self.g.f, self.g.r]
        return [(self.z, nn.Linear), *((part, GateLinear) for part in gates if part is not None)]

    def constants(self) -> dict[str, Tensor]:
        """Return A and B of one step; without a window, they change from step to step."""
        if self.window is None:
            return {}
        return discretize(matrices(self.measure, self.order), 1 / self.window, self.discretization)._asdict()
