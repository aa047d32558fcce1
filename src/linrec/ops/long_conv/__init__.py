"""The long convolution: every channel filtered by a kernel as long as the sequence."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, cat

from linrec.ops.core.backends import WITHOUT_RESET, Backend, few, never
from linrec.ops.core.call import Operator, documented
from linrec.ops.core.checks import check_axes, check_precision, check_shape, check_supported
from linrec.ops.core.isolation import documents, entering
from linrec.ops.long_conv.cauchy import cauchy_kernel
from linrec.ops.long_conv.discretization import DISCRETIZATIONS, Discretization, discretize_diagonal
from linrec.ops.long_conv.powers import vandermonde_kernel
from linrec.ops.long_conv.reference import long_conv_reference
from linrec.ops.long_conv.torch import Convolution, by_fft, by_sums
from linrec.ops.long_conv.triton import convolution as convolution_triton

__all__ = [
    "DISCRETIZATIONS",
    "OPERATOR",
    "Discretization",
    "cauchy_kernel",
    "discretize_diagonal",
    "long_conv",
    "vandermonde_kernel",
]

FEW = 8
"""Up to this many steps, a sum over all taps for each is cheaper than a transform of all inputs."""


class LongConv(NamedTuple):
    """The operator's inputs.

    Attributes:
        u: (b, t, d).
        kernel: (d, length).
        state: (b, s, d), or None for no step.
        reset: (b, t), or None.
    """

    u: Tensor
    kernel: Tensor
    state: Tensor | None
    reset: Tensor | None


def _canonical(given: LongConv) -> LongConv:
    """Check shapes and dtypes; the state is checked here, for it has any number of steps."""
    u, kernel, state, _ = given
    check_axes("u", u, "(batch, time, channels)", "Add the missing axes, or flatten heads into channels.")
    check_supported("u", u)
    batch, time, channels = u.shape
    cure = "Pass one row of taps per channel, the tap of the current step first."
    check_shape("kernel", kernel, "(d, length)", (channels, "length"), cure)
    check_precision("kernel", kernel, u, "u")
    cure = "Pass the state that the previous call returned, or None."
    check_shape("state", state, "(b, s, d)", (batch, "s", channels), cure)
    past = 0
    if state is not None:
        check_supported("state", state)
        past = state.shape[1]
    if kernel.shape[1] > past + time:
        raise ValueError(
            f"`kernel` must have at most as many taps as there are inputs, s + t = {past} + {time}; "
            f"got {kernel.shape[1]}. Cut it to `kernel[:, :{past + time}]`: no input reaches further taps."
        )
    return given


def _run(given: LongConv, convolve: Callable[[Convolution, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return y of all inputs so far, and these inputs as the state."""
    u, kernel, state, reset = given
    inputs = u if state is None else cat([entering(state, reset).to(u.dtype), u], dim=1)
    before = inputs.shape[1] - u.shape[1]
    if reset is None:
        return convolve(Convolution(inputs, kernel, None), before), inputs
    document = documents(reset, past=before)
    hidden = (document != document[:, -1:])[..., None]
    return convolve(Convolution(inputs, kernel, document), before), inputs.masked_fill(hidden, 0)


def _entry(mode: str, name: str, convolve: Callable[..., Tensor], about: str, **options: Any) -> Backend:
    # the state keeps the dtype of u, and each piece is widened as it is transformed
    return Backend(mode, name, partial(_run, convolve=convolve), about, widen=False, **options)


_SUMS, _FFT = "a sum over the taps for each step; good for a few steps", "by FFT, O(t log t)"
_FUSED = f"{_FFT}, with one kernel for all between two transforms; without `reset`"
_BY_TRITON = partial(by_fft, convolve=convolution_triton)
BACKENDS = (
    _entry("recurrent", "torch", by_sums, _SUMS, auto=lambda given: few(given.u.shape[1], FEW)),
    _entry("convolution", "triton", _BY_TRITON, _FUSED, **WITHOUT_RESET),
    _entry("convolution", "torch", by_fft, f"{_FFT}; with `reset`, O(t log^2 t)"),
    _entry("recurrent", "reference", long_conv_reference, "a loop over time and taps, slow", auto=never),
)
OPERATOR = Operator(
    "long_conv", LongConv, "u", _canonical, lambda given: (given.u.shape, given.u.dtype), "(b, s, d)",
    state=None, backends=BACKENDS,
)  # fmt: skip
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def long_conv(
    u: Float[Tensor, "b t d"],
    kernel: Float[Tensor, "d length"],
    *,
    state: Float[Tensor, "b s d"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b inputs d"]]:
    """Convolve every channel with its own kernel, causally: y = K * u.

        y_td = sum_{j=0..length-1} K_dj u_{t-j,d}

    The state is the inputs so far, oldest first: it grows. A kernel that a state-space model generates needs
    none of that; `linrec.ops.diagonal_ssm` has a state of fixed size.

    {backends}

    `"auto"` takes sums for at most 8 steps, else FFTs: on CUDA by Triton, unless there is a `reset`. Both are
    computed in float32 (float64 for double inputs). Sequences are padded to an even length whose prime
    factors are 2, 3 and 5 (with `reset`, to a power of two), and transformed some channels at a time: beside
    inputs, outputs and gradients, neither pass needs more memory than `u` and K take, or 64 MiB. Gradients
    need u and K alone, and no spectrum is kept for them. Forward mode (`torch.func.jvp`) goes through the
    sums alone.

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        kernel: K (d, length), the tap of the current step first, in the dtype of `u`, or in float32 beside an
            input in half precision. At most as long as all inputs, s + t: cut what is longer.
        state: the inputs before the first (b, s, d), any s, in any precision; None means none.
        reset: (b, t) bool; true at t hides all steps before t from t and later ones, the state too. Triton's
            backend takes None alone.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch", "triton" or "reference".

    Returns:
        y (b, t, d) in the dtype of `u`, and all s + t inputs in that dtype, with zeros for those that a reset
        hides: `u` itself where there is no state and no reset. A caller whose kernel never has more than n
        taps need keep no more than the last n - 1.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices that do not fit together; a kernel longer than the inputs; an unknown
            (mode, backend), or one that cannot run here.

    Source:
        Gu, Goel and Ré, S4 (2022), eq. 4 and 5: a linear state-space model is a convolution.

    Example:
        A kernel that halves at each step:

        >>> import torch
        >>> u, kernel = torch.tensor([1.0, 0.0, 4.0]).reshape(1, 3, 1), 0.5 ** torch.arange(3.0)[None]
        >>> y, state = long_conv(u, kernel)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([1.0, 0.5, 4.25], [1.0, 0.0, 4.0])
        >>> long_conv(torch.zeros(1, 1, 1), 0.5 ** torch.arange(4.0)[None], state=state)[0].item()
        2.125
    """
    return OPERATOR(LongConv(u, kernel, state, reset), mode, backend)
