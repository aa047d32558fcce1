"""Chooses who runs an operator: pure functions of shape, device and what is installed, and the probes."""

from collections.abc import Sequence

from linrec.errors import unknown
from linrec.ops.core.machine import exporting as exporting
from linrec.ops.core.machine import numba_usable as numba_usable
from linrec.ops.core.machine import refusal as refusal
from linrec.ops.core.machine import usable

Pair = tuple[str, str]
"""(mode, backend): the mathematics, and who runs it."""


def resolve(op_name: str, pairs: Sequence[Pair], mode: str, backend: str, auto: Sequence[Pair]) -> Pair:
    """Return the (mode, backend) pair that a call runs.

    What is given explicitly is obeyed or refused; only "auto" is filled in: with the first pair of `auto`
    that agrees with the explicit part, else with the first such pair of `pairs`.

    Args:
        op_name: the operator's name, for the error.
        pairs: every pair that exists.
        mode: a mode, or "auto".
        backend: a backend, or "auto".
        auto: the pairs that are usable for this call, best first.

    Returns:
        One element of `pairs`.

    Raises:
        ValueError: an unknown mode or backend, or a combination that does not exist.

    Example:
        >>> pairs = [("recurrent", "torch"), ("scan", "torch"), ("scan", "triton")]
        >>> resolve("scan", pairs, "auto", "torch", auto=[("scan", "triton"), ("scan", "torch")])
        ('scan', 'torch')
    """
    check_mode(op_name, pairs, mode)
    backends = list(dict.fromkeys(pair[1] for pair in pairs))
    if backend != "auto" and backend not in backends:
        raise unknown(f"backend of `{op_name}` called", backend, ["auto", *backends])
    for pair in [*auto, *pairs]:
        if pair in pairs and mode in ("auto", pair[0]) and backend in ("auto", pair[1]):
            return pair
    listed = ", ".join(f"({m!r}, {b!r})" for m, b in pairs)
    raise ValueError(
        f"`{op_name}` has no (mode, backend) = ({mode!r}, {backend!r}); the pairs that exist are {listed}. "
        f'Leave one of the two at "auto" to have it chosen.'
    )


def check_mode(op_name: str, pairs: Sequence[Pair], mode: str) -> None:
    """Refuse a mode that the operator does not have, as `resolve` does when it runs.

    Args:
        op_name: the operator's name.
        pairs: every pair that exists.
        mode: a mode, or "auto".

    Raises:
        ValueError: an unknown mode; the message names the nearest one.

    Example:
        >>> check_mode("scan", [("recurrent", "torch"), ("scan", "torch")], "auto")
    """
    modes = ["auto", *dict.fromkeys(pair[0] for pair in pairs)]
    if mode not in modes:
        raise unknown(f"mode of `{op_name}` called", mode, modes)


def auto_scan(
    shape: tuple[int, int, int], device_type: str, *, numba: bool, triton: bool, exporting: bool = False
) -> list[Pair]:
    """Return the pairs that `ops.scan` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | one step | (recurrent, torch) | a kernel's launch costs more than the step |
    | being exported | (scan, torch) | the program must run where linrec's kernels are not |
    | CUDA with Triton | (scan, triton) | |
    | CPU with Numba | (recurrent, numba) | |
    | at most 16 steps | (recurrent, torch) | fewer launches than the blocked scan |
    | else | (scan, torch) | |

    Args:
        shape: (batch, time, channels).
        device_type: "cpu", "cuda", "mps", "meta", ...
        numba: Numba works on this machine.
        triton: Triton works on this device.
        exporting: torch.export is tracing the call.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_scan((8, 4096, 512), "cpu", numba=True, triton=False)[0]
        ('recurrent', 'numba')
    """
    time = shape[1]
    order: list[Pair] = [("scan", "torch"), ("recurrent", "torch")]
    # one program serves all lengths from 2 on: a comparison with any other number would limit them
    if time <= 1 or (not exporting and time <= SHORT):
        order.reverse()
    if exporting or time <= 1:
        return order
    if triton and device_type == "cuda":
        return [("scan", "triton"), *order]
    if numba and device_type == "cpu":
        return [("recurrent", "numba"), *order]
    return order


SHORT = 16
"""Up to this many steps, a loop over time in torch launches fewer operations than the blocked scan."""


def triton_usable(device_type: str) -> bool:
    """Return whether Triton kernels run on tensors of this device type."""
    return usable("triton", device_type)
