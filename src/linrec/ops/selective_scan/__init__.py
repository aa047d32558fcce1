"""The selective state space: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t."""

from typing import Any

from jaxtyping import Bool, Float

# by name, since `torch` is a module of this package
from torch import Tensor, cat

from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.dispatch import Pair, exporting, numba_usable, refusal, resolve, triton_usable
from linrec.ops.precision import accumulation, widened, without_autocast
from linrec.ops.selective_scan.auto import PAIRS, auto_selective_scan
from linrec.ops.selective_scan.autograd import run
from linrec.ops.selective_scan.inputs import check
from linrec.ops.selective_scan.reference import selective_scan_reference

__all__ = ["PAIRS", "selective_scan"]


def selective_scan(
    x: Float[Tensor, "b t c"],
    dt: Float[Tensor, "b t c"],
    A: Float[Tensor, "c n"],
    B: Float[Tensor, "b t *groups n"],
    C: Float[Tensor, "b t *groups n"],
    D: Float[Tensor, "c"] | None = None,
    *,
    state: Float[Tensor, "b c n"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c n"]]:
    """Run the linear recurrence of n states per channel, whose step size, input and output weights change.

        h_tc = exp(dt_tc A_c) h_{t-1,c} + dt_tc x_tc B_t,    h_0 = state
        y_tc = sum_n C_tn h_tcn + D_c x_tc

    exp(dt A) is the zero-order hold of the system h' = A h + B x over a step of length dt; that of B is
    replaced by dt B, as in the paper's code. All channels, or those of a group, share B and C.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time, differentiated by autograd: the oracle, slow |
    | chunkwise | torch | a parallel scan within chunks, the recurrence between them |
    | recurrent | numba | CPU: time in a loop, with the states in the caches of threads |
    | recurrent | triton | CUDA: time in a loop, with the states in registers |

    All but the reference keep the states that chunks of steps start from, and make those of the steps again
    for the gradient: (b, t, c, n) is never in memory. `"auto"` takes the best pair that works for the call
    (the table is at `linrec.ops.selective_scan.auto.auto_selective_scan`); what is given explicitly is obeyed
    or refused. Gradients that are to be differentiated again are made by torch operations.

    Args:
        x: input (b, t, c), real, in float32, float64, bfloat16 or float16.
        dt: step sizes (b, t, c), >= 0, in the dtype of `x`, or in float32 beside inputs in half precision.
        A: rates (c, n), <= 0; dtypes as for `dt`. Values of A and dt out of range are an error on the CPU;
            elsewhere, and under torch.compile, where looking would mean waiting, they are not looked at.
        B: input weights (b, t, n), or (b, t, groups, n), of which each is for c / groups neighbouring
            channels; dtypes as for `dt`.
        C: output weights, of the shape of `B`.
        D: skip weights (c,), dtypes as for `dt`; None is none.
        state: h_0 (b, c, n), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial one.
        mode: "auto", "recurrent" or "chunkwise".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, c) in the dtype of `x`, and h_t (b, c, n) in float32 (float64 for double inputs). For
        zero-length time h_t is h_0.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes or devices that do not fit together; values out of range; a (mode, backend) that
            does not exist, or that cannot run here; a call within `time_parallel`.

    Source:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023), algorithm 2.

    Example:
        A state that keeps half of itself and takes in half of the input:

        >>> import torch
        >>> ones = torch.ones(1, 3, 1)
        >>> y, state = selective_scan(ones, 0.5 * ones, 2 * torch.tensor([[0.5]]).log(), ones, ones)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([0.5, 0.75, 0.875], [0.875])
    """
    check(x, dt, A, B, C, D, state, reset)
    batch, time, channels = x.shape
    pair = _pair(time, x.device.type, mode, backend)
    refuse_split_time("selective_scan")
    wide = accumulation(x.dtype)
    shape = batch, channels, A.shape[1]
    state = x.new_zeros(shape, dtype=wide) if state is None else state.to(wide)
    if time == 0:
        return x.clone(), state.clone()
    B, C = (shared if shared.ndim == 4 else shared[:, :, None] for shared in (B, C))
    inputs: list[Any] = [x, dt, A, B, C, D]
    # accumulation stays in float32 where the caller's matrix products do not
    device = x.device.type
    with without_autocast(device):
        if pair[1] == "reference":
            y, state = selective_scan_reference(*(*widened(*inputs), state, reset))
            return y.to(x.dtype), state
        A, D = A.to(wide), x.new_zeros(channels, dtype=wide) if D is None else D.to(wide)
        groups = B.shape[2]
        outputs, states = [], []
        for group in range(groups):
            part = slice(group * channels // groups, (group + 1) * channels // groups)
            y, last = run(
                x[..., part],
                dt[..., part],
                # states of kernels have neighbouring channels next to each other
                A[part].mT[None],
                B[:, :, group],
                C[:, :, group],
                D[part][None],
                state[:, part].mT,
                reset,
                pair[1],
            )
            outputs.append(y)
            states.append(last.mT)
        return (outputs[0], states[0]) if groups == 1 else (cat(outputs, 2), cat(states, 1))


def _pair(time: int, device: str, mode: str, backend: str) -> Pair:
    """The (mode, backend) that a call of so many steps runs."""
    auto = auto_selective_scan(
        time,
        device,
        numba=device == "cpu" and numba_usable(),
        triton=triton_usable(device),
        exporting=exporting(),
    )
    pair = resolve("selective_scan", PAIRS, mode, backend, auto)
    refused = refusal("selective_scan", pair[1], device)
    if refused is not None:
        raise ValueError(refused)
    return pair
