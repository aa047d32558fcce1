"""Which (mode, backend) pairs `diagonal_ssm` has, and which of them runs where the caller leaves it open."""

from torch import Tensor

from linrec.ops import splitting
from linrec.ops.dispatch import SHORT, Pair, auto_scan, exporting, numba_usable, resolve, triton_usable
from linrec.ops.scan import PAIRS as SCAN_PAIRS

OWN: tuple[Pair, ...] = (("recurrent", "reference"), ("convolution", "torch"))

# every entry of the state is a channel of `ops.scan`, whatever runs it
PAIRS: tuple[Pair, ...] = (*OWN, *(pair for pair in SCAN_PAIRS if pair not in OWN))


def pair_of(u: Tensor, states: int, mode: str, backend: str) -> Pair:
    """Return the (mode, backend) that a call with inputs `u` (b, t, d) and so many states a channel runs."""
    device = u.device.type
    return resolve(
        "diagonal_ssm",
        PAIRS,
        mode,
        backend,
        auto_diagonal_ssm(
            (*u.shape, states),
            device,
            numba=device == "cpu" and numba_usable(),
            triton=triton_usable(device),
            exporting=exporting(),
            split=splitting.current is not None,
        ),
    )


def auto_diagonal_ssm(
    shape: tuple[int, int, int, int],
    device_type: str,
    *,
    numba: bool,
    triton: bool,
    exporting: bool = False,
    split: bool = False,
) -> list[Pair]:
    """Return the pairs that `ops.diagonal_ssm` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | being exported, from 2 steps on | (convolution, torch) | one program serves all lengths |
    | at most 16 steps | as `ops.scan` on d n channels | there is little to convolve, and few states |
    | time is split over processes | as `ops.scan` on d n channels | a convolution needs all steps |
    | else | (convolution, torch) | the states of all steps are n times as large as the input |

    Args:
        shape: (batch, time, channels, states per channel).
        device_type: "cpu", "cuda", "mps", "meta", ...
        numba: Numba works on this machine.
        triton: Triton works on this device.
        exporting: torch.export is tracing the call.
        split: each process has some of the steps.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_diagonal_ssm((8, 4096, 512, 32), "cuda", numba=False, triton=True)[0]
        ('convolution', 'torch')
        >>> auto_diagonal_ssm((8, 1, 512, 32), "cuda", numba=False, triton=True)[0]
        ('recurrent', 'torch')
    """
    batch, time, channels, states = shape
    states_at_once = auto_scan(
        (batch, time, channels * states), device_type, numba=numba, triton=triton, exporting=exporting
    )
    if time <= 1 or split or (not exporting and time <= SHORT):
        return states_at_once
    # an explicit "recurrent" or "scan" finds what `scan` would take
    return [("convolution", "torch"), *states_at_once]
