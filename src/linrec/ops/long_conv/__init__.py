"""The long convolution: every channel filtered by a kernel as long as the sequence, by FFT."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor, cat
from torch.nn import functional

from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.core.isolation import entering
from linrec.ops.dispatch import Pair, exporting, refusal, resolve, triton_usable
from linrec.ops.long_conv.discretization import DISCRETIZATIONS, Discretization, discretize_diagonal
from linrec.ops.long_conv.inputs import check
from linrec.ops.long_conv.kernels import cauchy_kernel, vandermonde_kernel
from linrec.ops.long_conv.reference import long_conv_reference
from linrec.ops.long_conv.torch import FEW, by_fft, by_sums
from linrec.ops.precision import without_autocast

__all__ = [
    "DISCRETIZATIONS",
    "PAIRS",
    "Discretization",
    "cauchy_kernel",
    "discretize_diagonal",
    "long_conv",
    "vandermonde_kernel",
]

_RUN: dict[Pair, Callable[[Tensor, Tensor, Tensor | None, int], Tensor]] = {
    ("recurrent", "reference"): long_conv_reference,
    ("recurrent", "torch"): by_sums,
    ("convolution", "torch"): by_fft,
    ("convolution", "triton"): partial(by_fft, fused=True),
}
PAIRS: tuple[Pair, ...] = tuple(_RUN)


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

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time and taps: the oracle, slow |
    | recurrent | torch | a sum over the taps for each step; good for a few steps |
    | convolution | torch | by FFT, O(t log t); with `reset`, O(t log^2 t) |
    | convolution | triton | the same, with one kernel for all between two FFTs; with `reset`, as by torch |

    `"auto"` takes sums for at most 8 steps, else FFTs, on CUDA with Triton's kernels. They are computed in
    float32 (float64 for double inputs). Sequences are padded to an even length whose prime factors are 2, 3
    and 5 (with `reset`, to a power of two), and transformed some channels at a time: beside inputs, outputs
    and gradients, neither pass needs more memory than `u` and K take, or 64 MiB. For the gradients, u and K
    are kept and no spectrum. Forward mode (`torch.func.jvp`) goes through the sums alone.

    Args:
        u: input (b, t, d) in float32, float64, bfloat16 or float16.
        kernel: K (d, length), the tap of the current step first, in the dtype of `u`, or in float32 beside an
            input in half precision. At most as long as all inputs, s + t: cut what is longer.
        state: the inputs before the first (b, s, d), any s, in any precision; None means none.
        reset: (b, t) bool; true at t hides all steps before t from t and later ones, the state too.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch", "triton" or "reference".

    Returns:
        y (b, t, d) in the dtype of `u`, and all s + t inputs in that dtype, with zeros for those that a reset
        hides: `u` itself where there is no state and no reset. A caller whose kernel never has more than n
        taps need keep no more than the last n - 1.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
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
    check(u, kernel, state, reset)
    time = u.shape[1]
    device = u.device.type
    # one program serves all lengths from 2 on: a comparison with any other number would limit them
    few = time <= 1 or (not exporting() and time <= FEW)
    best: list[Pair] = [("recurrent", "torch")] if few else []
    if triton_usable(device):
        best.append(("convolution", "triton"))
    pair = resolve("long_conv", PAIRS, mode, backend, [*best, ("convolution", "torch")])
    refused = refusal("long_conv", pair[1], device)
    if refused is not None:
        raise ValueError(refused)
    refuse_split_time("long_conv")
    inputs = u if state is None else cat([entering(state, reset).to(u.dtype), u], dim=1)
    before = inputs.shape[1] - time
    # steps see those of their own document: the number of resets before
    document = None if reset is None else functional.pad(reset.cumsum(1), (before, 0))
    with without_autocast(device):
        y = _RUN[pair](inputs, kernel, document, before)
    if document is not None and time:
        hidden = document != document[:, -1:]
        inputs = inputs.masked_fill(hidden[..., None], 0)
    return y.to(u.dtype), inputs
