"""The short convolution: a depthwise causal filter with few taps, and the last inputs as its state."""

from jaxtyping import Bool, Float
from torch import Tensor, zeros

from linrec.ops.core.backends import Backend, never
from linrec.ops.core.call import Operator, Space, documented
from linrec.ops.core.checks import check_axes, check_precision, check_shape, check_supported
from linrec.ops.core.precision import accumulation
from linrec.ops.short_conv.reference import short_conv_reference
from linrec.ops.short_conv.torch import ShortConv, convolution
from linrec.ops.short_conv.triton import MOST_TAPS
from linrec.ops.short_conv.triton import convolution as convolution_triton

__all__ = ["OPERATOR", "short_conv"]


def _canonical(given: ShortConv) -> ShortConv:
    """Check shapes and dtypes."""
    x, weight, bias = given[:3]
    check_axes("x", x, "(batch, time, channels)", "Add the missing axes, or flatten heads into channels.")
    check_supported("x", x)
    channels = x.shape[2]
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise ValueError(
            f"`weight` must have shape (c, width) = ({channels}, width), width at least 1; got "
            f"{tuple(weight.shape)}. For a depthwise torch.nn.Conv1d, pass `conv.weight[:, 0].flip(-1)`."
        )
    check_shape("bias", bias, "(c,)", (channels,), "Pass one number per channel.")
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_precision(name, parameter, x, "x")
    return given


def _output(given: ShortConv) -> Space:
    return given.x.shape, given.x.dtype


def _state(given: ShortConv) -> Space:
    (batch, _, channels), width = given.x.shape, given.weight.shape[1]
    return (batch, width - 1, channels), accumulation(given.x.dtype)


BACKENDS = (
    Backend(
        "convolution",
        "triton",
        convolution_triton,
        "one kernel, on GPUs",
        widen=False,
        # a compiler fuses the products of a single step
        auto=lambda given: given.x.shape[1] > 1,
        accepts=lambda given: given.weight.shape[1] <= MOST_TAPS,
        requires=f"at most {MOST_TAPS} taps",
    ),
    Backend("convolution", "torch", convolution, "a sum of `width` shifted products, for any length"),
    Backend("recurrent", "reference", short_conv_reference, "a loop over time: the oracle, slow", auto=never),
)
OPERATOR = Operator(
    "short_conv", ShortConv, "x", _canonical, _output, "(b, width - 1, c)", _state, BACKENDS,
    empty=lambda batch, width, c, **like: zeros(batch, max(width - 1, 0), c, **like),
)  # fmt: skip
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def short_conv(
    x: Float[Tensor, "b t c"],
    weight: Float[Tensor, "c width"],
    bias: Float[Tensor, "c"] | None = None,
    *,
    state: Float[Tensor, "b width-1 c"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    silu: bool = False,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b width-1 c"]]:
    """Filter every channel causally with its own few taps: a depthwise convolution.

        y_tc = f(sum_{j=0..width-1} w_cj x_{t-j,c} + b_c)

    The first tap belongs to the current step. The state holds the last width - 1 inputs, oldest first, on
    which later outputs depend.

    {backends}

    Args:
        x: input (b, t, c) in float32, float64, bfloat16 or float16.
        weight: taps (c, width), width at least 1, in the dtype of `x`, or in float32 with a half-precision
            input. `torch.nn.Conv1d` stores taps in reverse: pass `conv.weight[:, 0].flip(-1)`.
        bias: (c,), dtypes as for `weight`.
        state: previous inputs (b, width - 1, c), in any precision; None means zeros.
        reset: (b, t) bool; true at t hides all steps before t, and the state, from step t and later steps.
        silu: whether f is SiLU; else f is the identity. The Triton kernel saves `x` alone for the gradient.
        mode: "auto", "convolution" or "recurrent".
        backend: "auto", "torch", "triton" or "reference".

    Returns:
        y (b, t, c) in the dtype of `x`, and the last width - 1 inputs in float32 (float64 for double inputs),
        with zeros for steps that a reset hides and for missing steps.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices do not match; (mode, backend) is unknown.

    Source:
        Gu and Dao, Mamba (2023), section 3.4, and many later models use it before the recurrence.

    Example:
        Differences between consecutive inputs, in two calls:

        >>> import torch
        >>> x, taps = torch.tensor([1.0, 3.0, 6.0]).reshape(1, 3, 1), torch.tensor([[1.0, -1.0]])
        >>> y, state = short_conv(x, taps)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([1.0, 2.0, 3.0], [6.0])
        >>> short_conv(torch.full((1, 1, 1), 10.0), taps, state=state)[0].item()
        4.0
    """
    return OPERATOR(ShortConv(x, weight, bias, state, reset, silu), mode, backend)
