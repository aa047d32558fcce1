"""The elementwise recurrence y_t = a_t y_{t-1} + x_t, real or complex."""

from collections.abc import Callable

from jaxtyping import Bool, Inexact
from torch import Tensor, float32

from linrec.ops.core.backends import Backend, always, few, never
from linrec.ops.core.call import Operator, Space, documented
from linrec.ops.core.checks import check_axes, check_supported, name_of
from linrec.ops.core.precision import accumulation
from linrec.ops.scan.numba import recurrent as recurrent_numba
from linrec.ops.scan.reference import scan_reference
from linrec.ops.scan.torch import Scan, Values, in_blocks, promoted, recurrent
from linrec.ops.scan.triton import scan as scan_triton

__all__ = ["OPERATOR", "scan"]


def _canonical(given: Scan) -> Scan:
    """Check shapes and dtypes, and reshape `a` to three axes."""
    a, x = given.a, given.x
    check_axes("x", x, "(batch, time, channels)", "Add the missing axes, or flatten heads into channels.")
    of_a, of_x = check_supported("a", a, complex_too=True), check_supported("x", x, complex_too=True)
    if of_a != of_x and (a.dtype, accumulation(x.dtype)) != (float32, float32):
        raise TypeError(
            f"`a` and `x` must have the same precision, real or complex; got {name_of(a.dtype)} and "
            f"{name_of(x.dtype)}. Convert one to the other's precision; with an `x` in half precision, `a` "
            "may be float32."
        )
    # only shapes of equal length are compared: torch.export must not compare the batch with the channels
    if a.ndim == x.ndim and a.shape == x.shape:
        return given
    batch, time, channels = x.shape
    sizes = zip(a.shape[::-1], x.shape[::-1], strict=False)
    if a.ndim > 3 or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"`a` must broadcast to x's shape (b, t, c) = {(batch, time, channels)}; got {tuple(a.shape)}. "
            f"Pass one decay per step and channel {(batch, time, channels)}, per step {(batch, time, 1)}, "
            f"per channel {(channels,)}, or a scalar ()."
        )
    return given._replace(a=a.reshape((1,) * (3 - a.ndim) + a.shape))


def _entry(
    mode: str, name: str, run: Callable[[Scan], Values], about: str, auto: Callable[[Scan], bool] = always
) -> Backend[Scan]:
    """Return an entry of the table; its `run` gets resets in its own direction of time."""

    def linked(given: Scan) -> Values:
        if given.reset is None or not given.reverse:
            return run(given)
        # in reverse, a reset at t+1 cuts the link into step t, which comes from step t+1
        cut = given.reset.roll(-1, dims=1)
        cut[:, -1] = False
        return run(given._replace(reset=cut))

    # backends convert half precision themselves, and return y in it, because y is saved for the gradient
    return Backend(mode, name, linked, about, auto=auto, widen=False)


def _many(given: Scan) -> bool:
    # for few steps, a loop needs fewer operations than blocks
    return not few(given.x.shape[1], 16)


def _output(given: Scan) -> Space:
    return given.x.shape, promoted(given.a.dtype, given.x.dtype)


def _state(given: Scan) -> Space:
    return given.x.shape[::2], accumulation(promoted(given.a.dtype, given.x.dtype))


BACKENDS = (
    # launching a kernel costs more than a single step
    _entry("recurrent", "torch", recurrent, "a loop over time", lambda given: given.x.shape[1] <= 1),
    _entry("scan", "triton", scan_triton, "batch rows and channels in parallel, time in tiles"),
    _entry("recurrent", "numba", recurrent_numba, "batch rows and channels in parallel, time in a loop"),
    _entry("scan", "torch", in_blocks, "a blocked parallel scan of O(t) work", _many),
    _entry("recurrent", "reference", scan_reference, "a loop over time: the oracle, slow", never),
)
# zeros=False: a missing state is cheaper than zeros
OPERATOR = Operator("scan", Scan, "x", _canonical, _output, "(b, c)", _state, BACKENDS, zeros=False)
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def scan(
    a: Inexact[Tensor, "..."],
    x: Inexact[Tensor, "b t c"],
    *,
    state: Inexact[Tensor, "b c"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    reverse: bool = False,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Inexact[Tensor, "b t c"], Inexact[Tensor, "b c"]]:
    """Run the elementwise linear recurrence over time.

        y_t = a_t * y_{t-1} + x_t,    y_0 = state

    With `reverse=True` time runs backwards: y_t = a_t * y_{t+1} + x_t, and `state` comes after the last step.

    {backends}

    `"auto"` uses the first entry that supports the call; an explicit mode or backend is used or refused. To
    stream, pass the state from call to call; a single step is a sequence of length 1. Double backward, as
    under `torch.func.grad`, uses the torch backend. Every backend has forward mode: the tangent of a scan is
    the scan dy_t = a_t * dy_{t-1} + (da_t * y_{t-1} + dx_t).

    Args:
        a: decay or transition of each step, broadcast against x: (b, t, c), (t, c), (b, t, 1), (c,), or a
            scalar tensor. Its magnitude is not restricted, but |a| > 1 grows exponentially.
        x: input (b, t, c) in float32, float64, bfloat16, float16, complex64 or complex128. Either of a and x
            may be complex, with equal precision. With x in half precision, `a` may be in float32, and is not
            rounded.
        state: initial value (b, c), in any precision; None means zeros.
        reset: (b, t) bool; true at t cuts the link between steps t-1 and t. At t = 0 in forward time, this is
            the link to `state`.
        reverse: run from the last step to the first.
        mode: "auto", "recurrent" or "scan".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, c) in the dtype of x, complex if `a` is complex, and the last computed value (b, c): y at the
        last step, or at step 0 with `reverse=True`. For zero steps this is the given state. It has the
        accumulation dtype: float32 (complex64), or float64 (complex128) for double inputs.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes or devices do not match; (mode, backend) is unknown or cannot run here.

    Source:
        Katsch, GateLoop (2023), eq. 7 with x for k_n^T v_n; the operator of the parallel scan is eq. 13.

    Example:
        >>> import torch
        >>> a, x = torch.tensor(0.5), torch.ones(1, 4, 1)
        >>> y, state = scan(a, x)
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 1.5, 1.75, 1.875], [[1.875]])
        >>> scan(a, x, state=state, reset=torch.tensor([[False, False, True, False]]))[0].flatten().tolist()
        [1.9375, 1.96875, 1.0, 1.5]
    """
    return OPERATOR(Scan(a, x, state, reset, reverse), mode, backend)
