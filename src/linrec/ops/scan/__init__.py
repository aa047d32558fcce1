"""The elementwise recurrence y_t = a_t y_{t-1} + x_t, real or complex."""

from jaxtyping import Bool, Inexact
from torch import Tensor

from linrec.ops import splitting
from linrec.ops.dispatch import Pair, auto_scan, exporting, numba_usable, refusal, resolve, triton_usable
from linrec.ops.operators import differentiated
from linrec.ops.scan.autograd import Scan
from linrec.ops.scan.dtypes import SUPPORTED, accumulation, mixable, promoted
from linrec.ops.scan.reference import scan_reference

__all__ = ["PAIRS", "scan"]

PAIRS: tuple[Pair, ...] = (
    ("recurrent", "reference"),
    ("recurrent", "torch"),
    ("scan", "torch"),
    ("recurrent", "numba"),
    ("scan", "triton"),
)


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

    With `reverse=True` time runs backwards: y_t = a_t * y_{t+1} + x_t, and `state` follows the last step.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time, differentiated by autograd: the oracle, slow |
    | recurrent | torch | a loop over time in torch operations; good for a few steps |
    | scan | torch | a blocked parallel scan of O(t) work, on any device |
    | recurrent | numba | CPU: batch rows and channels in parallel, time in a loop |
    | scan | triton | CUDA: batch rows and channels in parallel, time in tiles |

    `"auto"` takes the best pair that works for the call (the table is at `linrec.ops.dispatch.auto_scan`);
    what is given explicitly is obeyed or refused. To stream, pass the state from call to call; a single step
    is a sequence of length 1. Gradients that are to be differentiated again, as under `torch.func.grad`, are
    made by the torch backend.

    Args:
        a: decay or transition of each step, broadcast against x: (b, t, c), (t, c), (b, t, 1), (c,), or a
            scalar tensor. Nothing limits its size, but |a| > 1 grows exponentially.
        x: input (b, t, c) in float32, float64, bfloat16, float16, complex64 or complex128. One of a and x may
            be real and the other complex, of equal precision; beside an x in half precision, `a` may be in
            float32, and is not rounded.
        state: value before the first step (b, c), in any precision; None means zeros.
        reset: (b, t) bool; true at t cuts the link between steps t-1 and t; forward, at t = 0, that is the
            link to `state`.
        reverse: run from the last step to the first.
        mode: "auto", "recurrent" or "scan".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, c) in the dtype of x, complex where `a` is, and the last value that was computed (b, c): y at
        the last step, or at step 0 with `reverse=True`; for zero-length time, the given state. The state has
        the dtype in which the recurrence is accumulated: float32 (complex64), or float64 (complex128) where
        the inputs are double.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes or devices that do not fit together; a (mode, backend) that does not exist, or that
            cannot run here.

    Source:
        Katsch, GateLoop (2023), eq. 7 with x for k_n^T v_n; the parallel scan's operator is eq. 13.

    Example:
        >>> import torch
        >>> a, x = torch.tensor(0.5), torch.ones(1, 4, 1)
        >>> y, state = scan(a, x)
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 1.5, 1.75, 1.875], [[1.875]])
        >>> scan(a, x, state=state, reset=torch.tensor([[False, False, True, False]]))[0].flatten().tolist()
        [1.9375, 1.96875, 1.0, 1.5]
    """
    _check(a, x, state, reset)
    batch, time, channels = x.shape
    device = x.device.type
    pair = resolve(
        "scan",
        PAIRS,
        mode,
        backend,
        auto_scan(
            (batch, time, channels),
            device,
            numba=device == "cpu" and numba_usable(),
            triton=triton_usable(device),
            exporting=exporting(),
        ),
    )
    refused = refusal("scan", pair[1], device)
    if refused is not None:
        raise ValueError(refused)
    if splitting.current is not None:
        return splitting.current.scan(a, x, state, reset, reverse, pair)
    dtype = promoted(a.dtype, x.dtype)
    wide = accumulation(dtype)
    if state is not None:
        state = state.to(wide)
    if time == 0:
        return (a * x).to(dtype), x.new_zeros(batch, channels, dtype=wide) if state is None else state.clone()
    if pair[1] == "reference":
        start = x.new_zeros(batch, channels, dtype=wide) if state is None else state
        return scan_reference(a.expand(x.shape), x, start, reset, reverse)
    a = a.reshape((1,) * (3 - a.ndim) + a.shape)
    # time runs backwards over the same links: the one into step t, from t+1, is cut by the reset at t+1
    cut = reset
    if reset is not None and reverse:
        cut = reset.roll(-1, dims=1)
        cut[:, -1] = False
    run = Scan.apply if differentiated(a, x, state) else Scan.forward
    return run(a, x, state, cut, reverse, pair)


def _check(a: Tensor, x: Tensor, state: Tensor | None, reset: Tensor | None) -> None:
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED)
    for name, tensor in (("a", a), ("x", x), ("state", state)):
        if tensor is not None and tensor.dtype not in SUPPORTED:
            raise TypeError(
                f"`{name}` must be one of {names}; got {_name(tensor)}. "
                "Convert it, e.g. with .to(torch.float32)."
            )
    if not mixable(a.dtype, x.dtype):
        raise TypeError(
            f"`a` and `x` must have the same precision, real or complex; got {_name(a)} and {_name(x)}. "
            "Convert one to the other's precision; beside an `x` in half precision, `a` may be float32."
        )
    if x.ndim != 3:
        raise ValueError(
            f"`x` must have shape (batch, time, channels); got {tuple(x.shape)}. "
            "Add the missing axes, or flatten heads into channels."
        )
    batch, time, channels = x.shape
    if not _broadcasts(a.shape, x.shape):
        raise ValueError(
            f"`a` must broadcast to x's shape (b, t, c) = {(batch, time, channels)}; got {tuple(a.shape)}. "
            f"Pass one decay per step and channel {(batch, time, channels)}, per step {(batch, time, 1)}, "
            f"per channel {(channels,)}, or one in all ()."
        )
    if state is not None and state.shape != (batch, channels):
        raise ValueError(
            f"`state` must have shape (b, c) = {(batch, channels)}; got {tuple(state.shape)}. "
            "Pass the state that the previous call returned, or None for zeros."
        )
    if state is not None and state.is_complex() and not (a.is_complex() or x.is_complex()):
        raise TypeError(
            f"`state` must be real where `a` and `x` are; got {_name(state)}. "
            "Pass its real part, or a complex `x`."
        )
    if reset is not None:
        if str(reset.dtype) != "torch.bool":
            raise TypeError(f"`reset` must be bool; got {_name(reset)}. Convert it, e.g. with `reset != 0`.")
        if reset.shape != (batch, time):
            raise ValueError(
                f"`reset` must have shape (b, t) = {(batch, time)}; got {tuple(reset.shape)}. "
                "Pass one flag per sequence and step."
            )
    for name, tensor in (("a", a), ("state", state), ("reset", reset)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"`{name}` must be on x's device {str(x.device)!r}; got {str(tensor.device)!r}. "
                f"Move it with .to({str(x.device)!r})."
            )


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, full) for size, full in zip(reversed(shape), reversed(target), strict=False)
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
