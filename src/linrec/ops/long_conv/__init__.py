"""The long convolution: every channel has a causal filter of up to the length of the sequence."""

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
"""For up to this many steps, summing over the taps is faster than FFTs of all inputs."""


class LongConv(NamedTuple):
    """The operator's inputs.

    Attributes:
        u: (b, t, d).
        kernel: (d, length).
        state: (b, s, d), or None for s = 0.
        reset: (b, t), or None.
    """

    u: Tensor
    kernel: Tensor
    state: Tensor | None
    reset: Tensor | None


def _canonical(given: LongConv) -> LongConv:
    """Check shapes and dtypes; also of the state, which may have any number of steps."""
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
            f"got {kernel.shape[1]}. Pass `kernel[:, :{past + time}]`: later taps have no input."
        )
    return given


def _run(given: LongConv, convolve: Callable[[Convolution, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return y, and all inputs so far as the state."""
    u, kernel, state, reset = given
    inputs = u if state is None else cat([entering(state, reset).to(u.dtype), u], dim=1)
    before = inputs.shape[1] - u.shape[1]
    if reset is None:
        return convolve(Convolution(inputs, kernel, None), before), inputs
    document = documents(reset, past=before)
    hidden = (document != document[:, -1:])[..., None]
    return convolve(Convolution(inputs, kernel, document), before), inputs.masked_fill(hidden, 0)


def _entry(mode: str, name: str, convolve: Callable[..., Tensor], about: str, **options: Any) -> Backend:
    # the state keeps the dtype of u, and each block of channels is widened when it is transformed
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

    The state consists of all inputs so far, oldest first, so it grows. Kernels of state-space models do not
    need it: `linrec.ops.diagonal_ssm` has a state of constant size.

    {backends}

    `"auto"` uses sums for at most 8 steps, else FFTs: on CUDA by Triton, unless there is a `reset`. FFTs
    compute in float32 (float64 for double inputs). Sequences are padded to an even length whose prime factors
    are 2, 3 and 5 (with `reset`, to a power of two). A block of channels is transformed at a time, so besides
    inputs, outputs and gradients each pass needs at most as much memory as `u` and K, or 64 MiB. Only u and K
    are saved for the gradients, no spectra. Forward-mode differentiation (`torch.func.jvp`) only supports the
    sums.

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        kernel: K (d, length), the tap of the current step first, in the dtype of `u`, or in float32 with a
            half-precision input. At most s + t taps: truncate longer kernels.
        state: previous inputs (b, s, d), any s, in any precision; None means no previous input.
        reset: (b, t) bool; true at t hides all steps before t, and the state, from step t and later steps.
            The Triton backend only supports None.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch", "triton" or "reference".

    Returns:
        y (b, t, d) in the dtype of `u`, and all s + t inputs in that dtype, with zeros for inputs that a
        reset hides. Without a state and resets, this is `u` itself. If the kernel never has more than n taps,
        it suffices to keep the last n - 1 inputs.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices do not match; the kernel is longer than the inputs; (mode, backend) is
            unknown or cannot run here.

    Source:
        Gu, Goel and Ré, S4 (2022), eq. 4 and 5: a linear state-space model is a convolution.

    Example:
        A kernel that is halved at each step:

        >>> import torch
        >>> u, kernel = torch.tensor([1.0, 0.0, 4.0]).reshape(1, 3, 1), 0.5 ** torch.arange(3.0)[None]
        >>> y, state = long_conv(u, kernel)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([1.0, 0.5, 4.25], [1.0, 0.0, 4.0])
        >>> long_conv(torch.zeros(1, 1, 1), 0.5 ** torch.arange(4.0)[None], state=state)[0].item()
        2.125
    """
    return OPERATOR(LongConv(u, kernel, state, reset), mode, backend)
