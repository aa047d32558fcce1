"""LMU: Legendre Memory Units (Voelker, Kajić and Eliasmith, 2019; in parallel, Chilkuri and Eliasmith, 2021).

    A_ij = (2i + 1) (-1 where i < j, else (-1)^(i-j+1)) / theta     B_i = (2i + 1) (-1)^i / theta
    u_t = E_x x_t + E_h h_{t-1} + E_m m_{t-1}
    m_t = Abar m_{t-1} + Bbar u_t
    h_t = f(W_x x_t + W_h h_{t-1} + W_m m_t)

x input, u the signal to remember, m memory: the coefficients of u over the last theta steps, in Legendre
polynomials; h output, f activation, Abar and Bbar A and B in steps of one by a zero-order hold. Without E_h,
E_m and W_h, the memory is a convolution (Chilkuri and Eliasmith, 2021):

    u_t = f_u(E_x x_t + b_u)     h_t = f(W_x x_t + W_m m_t + b_h)
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.hippo import Discretization, discretize, matrices
from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import drawn_linear, matrix
from linrec.ops.dense_ssm import dense_ssm
from linrec.rules import at_least, positive, require

__all__ = ["LMU", "Memory"]

Activation = Literal["tanh", "relu", "gelu", "none"]
Init = Literal["paper", "keras_lmu"]


class Memory(NamedTuple):
    """The state of an LMU with feedback.

    Args:
        m: (b, d_memory, order), the memories.
        h: (b, d_model), the last output.
    """

    m: Float[Tensor, "b d_memory order"]
    h: Float[Tensor, "b d_model"]


class LMU(Mixer):
    """m_t = Abar m_{t-1} + Bbar u_t, h_t = f(W_x x_t + W_m m_t): a window of u in Legendre polynomials.

    The defaults are the unit of 2021, without feedback, which is trained as a convolution and streamed as a
    recurrence; `mode` chooses, see `linrec.ops.dense_ssm`.

    | the papers' variant | argument |
    |---|---|
    | the LMU of 2019 | `feedback=True`, and `bias=False` for the exact equations; steps run one by one |
    | a memory of one signal, as on psMNIST in 2019 | `d_memory=1` with a higher `order` |
    | several memories (2021) | `d_memory` |

    A and B are not learned. They are formed in double precision, and stay in single precision where the
    weights are in half. When training starts, E_x and E_h are LeCun's uniform, E_m is zero, the W are
    Xavier's normal and biases zero, as in the code released in 2019. In keras-lmu, which followed it, E_x and
    E_h together, and W_x and W_m together, are Xavier's uniform, and E_m and W_h are orthogonal:
    `init="keras_lmu"`.

    Args:
        d_model: width of the sequence, in and out.
        order: polynomials of each memory, N.
        theta: steps that a memory looks back. With many more steps than `order`, fast changes are lost.
        d_memory: signals to remember, the width of u. None is an eighth of `d_model`, at least 1: with an
            `order` of 16, W_m then has 2 d_model^2 numbers.
        feedback: whether u and h see the last output, and u the last memory.
        activation: f, "tanh", "relu", "gelu" or "none".
        memory_activation: f_u, likewise.
        bias: whether there are b_u and b_h.
        discretization: "zoh", "bilinear" or "euler"; see `linrec.hippo.discretize`.
        init: where weights start, "paper" or "keras_lmu".
        mode: "auto", "convolution" or "recurrent"; with feedback not "convolution".

    Raises:
        ValueError: an unknown name, a size below 1, a `theta` that is not positive, or a `mode` that feedback
            does not have.

    Source:
        Voelker, Kajić and Eliasmith, Legendre Memory Units (2019); Chilkuri and Eliasmith, Parallelizing
        Legendre Memory Unit Training (2021).

    Example:
        >>> mixer = LMU(16, order=8, theta=40, d_memory=4)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 4, 8]))
    """

    recurrence = "dense_ssm"

    A: Tensor
    B: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        order: int = 16,
        theta: float = 64.0,
        d_memory: int | None = None,
        feedback: bool = False,
        activation: Activation = "tanh",
        memory_activation: Activation = "none",
        bias: bool = True,
        discretization: Discretization = "zoh",
        init: Init = "paper",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        dense_ssm.operator.check_mode(mode)
        at_least(1, order=order)
        at_least(1, d_memory=d_memory, or_none=True)
        positive(theta=theta, cure="It is the number of steps of a window.")
        require(
            not feedback or mode in ("auto", "recurrent"),
            f'`mode` must be "auto" or "recurrent" with `feedback=True`; got {mode!r}. With feedback, '
            "the memory is no convolution of the input.",
        )
        self.d_memory = max(1, d_model // 8) if d_memory is None else d_memory
        self.order, self.theta, self.discretization, self.mode = order, theta, discretization, mode
        self.feedback = feedback
        self.activation, self.memory_activation = activation, memory_activation

        self.E_x = lecun_linear(d_model, self.d_memory, bias=bias)
        self.W_x = drawn_linear(d_model, d_model, nn.init.xavier_normal_, bias=bias)
        self.W_m = drawn_linear(self.d_memory * order, d_model, nn.init.xavier_normal_)
        self.E_h: nn.Linear | None = None
        self.E_m: nn.Linear | None = None
        self.W_h: nn.Linear | None = None
        if feedback:
            self.E_h = lecun_linear(d_model, self.d_memory)
            self.E_m = drawn_linear(self.d_memory * order, self.d_memory, nn.init.zeros_)
            self.W_h = drawn_linear(d_model, d_model, nn.init.xavier_normal_)
        if init == "keras_lmu":
            _draw_as_keras([self.E_x, self.E_h], self.E_m)
            _draw_as_keras([self.W_x, self.W_m], self.W_h)
        self.add_constants(like=self.W_m.weight)
        # rounded to half precision they would be another system, which need not be stable
        self.keep_float32("A", "B")

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h, and m (b, d_memory, order), or with feedback a `Memory`."""
        if self.feedback:
            return self._mix_with_feedback(x, state, reset)
        f, f_u = ACTIVATIONS[self.activation], ACTIVATIONS[self.memory_activation]
        u = f_u(self.E_x(x))
        m, state = dense_ssm(u, self.A, self.B, state=state, reset=reset, mode=self.mode)
        return f(self.W_x(x) + self.W_m(m.flatten(-2))), state

    def _mix_with_feedback(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, Memory]:
        """Return h and the `Memory`, step by step: u depends on the memory in no linear way."""
        assert self.E_h is not None and self.E_m is not None and self.W_h is not None
        f, f_u = ACTIVATIONS[self.activation], ACTIVATIONS[self.memory_activation]
        m, h = self.init_state(x.shape[0], device=x.device) if state is None else state
        u_x, h_x = self.E_x(x).to(m.dtype), self.W_x(x).to(m.dtype)
        width = self.d_memory * self.order
        E_h, W_h = (matrix(part, self.d_model, x.device).to(m.dtype).mT for part in (self.E_h, self.W_h))
        E_m, W_m = (matrix(part, width, x.device).to(m.dtype).mT for part in (self.E_m, self.W_m))

        def step(state: Tensors, u_t: Tensor, h_t: Tensor) -> Step:
            m, h = state
            u = f_u(u_t + h @ E_h + m.flatten(1) @ E_m)
            m = m @ self.A.mT + u[..., None] * self.B
            h = f(h_t + h @ W_h + m.flatten(1) @ W_m)
            return (m, h), (h,)

        (m, h), (y,) = step_by_step("lmu", step, [m, h], [u_x, h_x], reset=reset)
        return y.to(x.dtype), Memory(m, h)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_memory, order); with feedback, and zeros (batch, d_model)."""
        kwargs = self.factory_kwargs(device)
        m = dense_ssm.empty_state(batch, self.d_memory, self.order, **kwargs)
        return Memory(m, torch.zeros(batch, self.d_model, **kwargs)) if self.feedback else m

    def constants(self) -> dict[str, Tensor]:
        """Return Abar and Bbar of the polynomials that the paper has."""
        A, B = discretize(matrices("legt", self.order), 1 / self.theta, self.discretization)
        # coefficients are sqrt(2i + 1) times the orthonormal ones, and polynomials run the other way
        i = torch.arange(self.order, dtype=A.dtype)
        scale = (2 * i + 1).sqrt() * (1 - 2 * (i % 2))
        return {"A": scale[:, None] * A / scale, "B": scale * B}


def _draw_as_keras(inputs: list[nn.Linear | None], recurrent: nn.Linear | None) -> None:
    """Draw weights as Keras does: of all inputs as one matrix, and orthogonal ones of the recurrence."""
    parts = [part for part in inputs if part is not None]
    bound = math.sqrt(6 / (sum(part.in_features for part in parts) + parts[0].out_features))
    for part in parts:
        nn.init.uniform_(part.weight, -bound, bound)
    if recurrent is not None:
        nn.init.orthogonal_(recurrent.weight)


def lecun_linear(d_in: int, d_out: int, *, bias: bool = False) -> nn.Linear:
    """Return y = W x + b, with entries of W uniform in +- sqrt(3 / d_in), of variance 1 / d_in, and b zero.

    Source:
        LeCun, Bottou, Orr and Müller, Efficient BackProp (1998).
    """
    return drawn_linear(d_in, d_out, nn.init.kaiming_uniform_, bias=bias, nonlinearity="linear")
