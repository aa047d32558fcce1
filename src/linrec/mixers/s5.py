"""S5: Simplified State Space Layers for Sequence Modeling (Smith, Warrington and Linderman, 2023).

    Lambda = -exp(A_log) + i A_imag     Delta = exp(dt_log)
    Lambdabar = exp(Lambda Delta)     Bbar = Lambda^-1 (Lambdabar - I) B
    x_k = Lambdabar * x_{k-1} + Bbar u_k     y_k = 2 Re(C x_k) + D * u_k
    z_k = GELU(y_k)     o_k = z_k * sigmoid(W z_k + b)

u input, x state with an entry of each conjugate pair, y output of the single system that all channels share,
o output of the layer; Lambda diagonal, B and C complex matrices (the paper's with a tilde), D a number per
channel, Delta a step size per entry of the state.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.hippo import diagonal
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.state_space import log_steps
from linrec.ops import discretize_diagonal, scan
from linrec.ops.inspection import note
from linrec.rules import at_least, positive, require

__all__ = ["S5"]

Output = Literal["half_glu", "half_glu2", "glu", "linear", "none"]
Discretization = Literal["zoh", "bilinear"]
Approximate = Literal["none", "tanh"]
StartOfC = Literal["eigenbasis", "lecun_normal", "complex_normal"]


class S5(Mixer):
    """x_k = Lambdabar * x_{k-1} + Bbar u_k, y_k = 2 Re(C x_k) + D * u_k: one system for all channels.

    S4D has a system for each channel. S5 has a single system of many inputs and outputs, whose state is small
    enough for a scan.

    | the paper's variant | argument |
    |---|---|
    | bilinear transform | `discretization="bilinear"` |
    | J blocks on HiPPO-N's diagonal | `n_blocks` |
    | one step size for the whole state | `shared_step=True` |
    | observations at irregular times | `dt` of `forward` |
    | a normal C, without the eigenvectors | `C_init="complex_normal"` |
    | a smaller C with the eigenvectors, as in the authors' ListOps and text | `C_init="lecun_normal"` |
    | no conjugate symmetry: entries of the state are not pairs, y = Re(C x) + D * u | `pairs=False` |
    | the map after the system | `activation`, `output` |
    | inputs of another sampling rate than in training | `step_rescale` |
    | both directions, each with a C of its own | `linrec.models.Bidirectional`, `unshared=("C", "D")` |

    Lambda starts as the eigenvalues of J blocks of the normal part of HiPPO-LegS, with eigenvectors V, and B
    as V^* times a real normal matrix. C starts as a complex normal matrix times V, with parts of variance 1 /
    d_state, or of 1 / (d_state d_model) with "lecun_normal"; with "complex_normal" there is no V, and the
    variance is 1. D starts normal, and steps log-uniform. The real part of Lambda always stays below zero,
    which the paper leaves open. Lambda, the steps and B are marked as group "transition" without weight
    decay, as the authors train them.

    With irregular steps, `dt` is a factor of Delta. A step of dt is then exact for an input that is constant
    during the step, with a zero-order hold.

    B and C are real matrices of pairs, as `linrec.mixers.lru.LRU` has them.

    Args:
        d_model: width of the sequence.
        d_state: P, numbers of the real state, of which one of each pair is kept. None is `d_model`, or the
            number above it that `2 n_blocks` divides, or `n_blocks` without pairs.
        n_blocks: J.
        discretization: "zoh" or "bilinear".
        dt_min: smallest step when training starts.
        dt_max: largest step when training starts.
        shared_step: whether Delta is a single number.
        C_init: how C starts, "eigenbasis", "lecun_normal" or "complex_normal".
        pairs: whether an entry of the state stands for itself and its conjugate. Without pairs, there are P
            complex entries, and both entries of a pair are learned separately.
        activation: whether y goes through GELU.
        output: "half_glu" (z * sigmoid(W z + b)), "half_glu2" (y * sigmoid(W z + b), z = GELU(y) in the gate
            alone), "glu", "linear" or "none".
        approximate: GELU, "none", or "tanh", its approximation, which the released code has; as in
            `torch.nn.GELU`.
        step_rescale: a factor of all steps Delta, such as 2 for inputs with half of the sampling rate.

    Raises:
        ValueError: an unknown name, a `d_state` that blocks do not divide, "half_glu2" without
            activation, a `step_rescale` that is not positive, or step sizes without 0 < dt_min <= dt_max.

    Source:
        S5 (Smith et al., 2023); the distributions of B and C, "half_glu2", and the steps per state come from
        the released code.

    Example:
        >>> mixer = S5(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 4]), torch.complex64)
    """

    recurrence = "scan"
    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        n_blocks: int = 1,
        discretization: Discretization = "zoh",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        shared_step: bool = False,
        C_init: StartOfC = "eigenbasis",
        pairs: bool = True,
        activation: bool = True,
        output: Output = "half_glu",
        approximate: Approximate = "none",
        step_rescale: float = 1.0,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_blocks=n_blocks)
        positive(step_rescale=step_rescale, cure="It is a factor; 1.0 leaves the steps as they are.")
        require(
            output != "half_glu2" or activation,
            '`output="half_glu2"` needs `activation=True`, which it leaves to the gate; got False. '
            'Without GELU it is "half_glu".',
        )
        of, unit = ("2 `n_blocks`", 2 * n_blocks) if pairs else ("`n_blocks`", n_blocks)
        self.d_state = -(-d_model // unit) * unit if d_state is None else d_state
        require(
            self.d_state >= 1 and self.d_state % unit == 0,
            f"`d_state` must be a positive multiple of {of} = {unit}, for blocks "
            f"{'of conjugate pairs' if pairs else 'of one size'}; got {self.d_state}.",
        )
        self.entries = self.d_state // 2 if pairs else self.d_state
        self.pairs = pairs
        self.discretization: Discretization = discretization
        self.activation, self.output, self.approximate = activation, output, approximate
        self.step_rescale = step_rescale

        Lambda, _, V = diagonal("legs", self.d_state // n_blocks, pairs=pairs)
        # of the matrix (P, d_model), JAX's `lecun_normal` takes the rows for inputs
        real = torch.randn(n_blocks, len(V), d_model) / math.sqrt(self.d_state)
        B = (V.mH @ real.to(V.dtype)).flatten(0, 1)
        if C_init != "complex_normal":
            fan = self.d_state if C_init == "eigenbasis" else self.d_state * d_model
            parts = torch.randn(2, n_blocks, d_model, len(V)) / math.sqrt(fan)
            C = (torch.complex(*parts).to(V.dtype) @ V).movedim(0, 1).flatten(1)
        else:
            C = torch.complex(*(math.sqrt(0.5) * torch.randn(2, d_model, self.entries)))

        dtype = torch.get_default_dtype()
        self.A_log = nn.Parameter((-Lambda.real).log().to(dtype).repeat(n_blocks))
        self.A_imag = nn.Parameter(Lambda.imag.to(dtype).repeat(n_blocks))
        self.dt_log = nn.Parameter(log_steps(1 if shared_step else self.entries, dt_min, dt_max))
        # rows 2j and 2j + 1 the parts of row j; columns 2j and 2j + 1 the real part and minus the other
        self.B = nn.Parameter(torch.view_as_real(B).movedim(-1, 1).flatten(0, 1).to(dtype))
        self.C = nn.Parameter(torch.view_as_real(C.conj().resolve_conj()).flatten(1).to(dtype))
        self.D = nn.Parameter(torch.randn(d_model))
        mark(self, "B")
        mark(self, "A_log", "A_imag", "dt_log", float32=True)
        wide = 2 * d_model if output == "glu" else d_model
        self.out = nn.Identity() if output == "none" else nn.Linear(d_model, wide)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return o, and the state x of the equations (b, n), n entries."""
        dtype = self.state_dtype
        Lambda = torch.complex(-self.A_log.to(dtype).exp(), self.A_imag.to(dtype))
        Delta = self.step_rescale * self.dt_log.to(dtype).exp()
        if dt is not None:
            Delta = dt.to(dtype)[..., None] * Delta
        # B u comes from real matrices, and Lambda^-1 (Lambdabar - I) multiplies it
        Lambdabar, scale = discretize_diagonal(Lambda, torch.ones_like(Lambda), Delta, self.discretization)
        Bu = torch.view_as_complex(functional.linear(x, self.B).to(dtype).unflatten(-1, (-1, 2)))
        note(gate=scale)
        h, state = scan(Lambdabar, scale * Bu, state=state, reset=reset)
        y = functional.linear(torch.view_as_real(h).flatten(-2).to(x.dtype), self.C)
        y = (2 * y if self.pairs else y) + self.D * x
        z = functional.gelu(y, approximate=self.approximate) if self.activation else y
        if self.output.startswith("half_glu"):
            return (z if self.output == "half_glu" else y) * torch.sigmoid(self.out(z)), state
        return functional.glu(self.out(z)) if self.output == "glu" else self.out(z), state
