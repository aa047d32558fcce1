"""The recurrence of the sLSTM: gates of h_{t-1}, and cells with a stabilised exponential input gate."""

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from linrec.nn.slstm_steps.torch import Ends, Steps, by_step, log_forget
from linrec.nn.slstm_steps.triton import fits, fused
from linrec.ops.core.backends import Backend, choose
from linrec.ops.core.call import in_turn
from linrec.ops.core.checks import check_axes, check_reset, check_shape

__all__ = ["SLSTMBackend", "log_forget", "slstm_steps"]

SLSTMBackend = Literal["auto", "torch", "triton"]

BACKENDS: tuple[Backend[Steps], ...] = (
    Backend(
        "recurrent",
        "triton",
        fused,
        "one kernel for all steps, on GPUs",
        accepts=fits,
        requires="inputs in single or half precision, and heads of at most 1,024 channels",
    ),
    Backend("recurrent", "torch", lambda given: by_step(given)[:2], "a loop over time"),
)


def slstm_steps(
    Wx: Float[Tensor, "b t 4 h d"],
    R: Float[Tensor, "h d 4*d"],
    state: Sequence[Tensor],
    *,
    reset: Bool[Tensor, "b t"] | None = None,
    sigmoid: bool = True,
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h d"], Ends]:
    """Run the recurrence of the sLSTM over time, in every head.

        (log i_t, f~_t, z~_t, o~_t) = Wx_t + h_{t-1} R
        m_t = max(log f_t + m_{t-1}, log i_t),  log f = log sigmoid(f~), or f~
        c_t = f'_t * c_{t-1} + i'_t * tanh(z~_t),  i' = exp(log i_t - m_t)
        n_t = f'_t * n_{t-1} + i'_t,  f' = exp(log f_t + m_{t-1} - m_t)
        h_t = sigmoid(o~_t) * c_t / n_t

    Here c and n are kept times exp(-m), as in the state. States and sums are in float32, or float64 for
    float64 inputs. The Triton kernel multiplies h and R in the dtype of R, and float32 in the precision of
    `torch.get_float32_matmul_precision()`: "highest" is three tf32 products, all else is one. "auto" is the
    kernel on GPUs, for heads of up to 1,024 channels.

    Args:
        Wx: arguments of the gates without h, in the order i, f, z, o.
        R: recurrent weights; the last axis holds the gates in the same order.
        state: `hidden`, `cell`, `normalizer` and `largest`, which are h, c, n and m before the first step,
            (b, h, d) each. A sequence starts from zeros and m = -inf. No gradient passes m.
        reset: true at t makes step t start from the state of a new sequence.
        sigmoid: whether forget gates are sigmoids; else they are exponentials.
        backend: "auto", "torch" or "triton".

    Returns:
        h of every step, and the state after the last step.

    Source:
        xLSTM (Beck and others, 2024). The kernel that holds the weights of a head over all steps follows
        FlashRNN (Poeppel and others, 2024).
    """
    check_axes("Wx", Wx, "(b, t, 4, h, d)", "Split the projection into gates and heads.")
    batch, _, _, heads, size = Wx.shape
    check_shape("Wx", Wx, "(b, t, 4, h, d)", ("b", "t", 4, "h", "d"), "Pass the gates i, f, z and o.")
    check_shape(
        "R", R, "(h, d, 4 d)", (heads, size, 4 * size), "Pass the weights of four gates for each head."
    )
    check_reset(reset, Wx)
    for name, part in zip(("hidden", "cell", "normalizer", "largest"), state, strict=True):
        check_shape(name, part, "(b, h, d)", (batch, heads, size), "Pass this batch's state.")

    def run(state: Sequence[Tensor]) -> tuple[Tensor, Ends]:
        hidden, cell, normalizer, largest = state
        given = Steps(Wx, R, hidden, cell, normalizer, largest, reset, sigmoid)
        y, end = choose("slstm_steps", BACKENDS, given, Wx.device.type, "auto", backend).run(given)
        return y, end

    y, end = in_turn("slstm_steps", run, tuple(state), [Wx, R])
    return y, end
