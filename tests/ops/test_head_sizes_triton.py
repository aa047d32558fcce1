"""The chunkwise Triton kernels of matrix states at every head size."""

import pytest
import torch

from linrec.ops import delta_rule, gate_loop, generalized_delta_rule
from linrec.testing import (
    check_operator,
    delta_rule_inputs,
    gate_loop_inputs,
    generalized_delta_rule_inputs,
    reset_mask,
)

from .triton_process import on_a_gpu, quiet

pytest.importorskip("triton")
pytestmark = quiet
SIZES = [1, 2, 3, 8, 15, 16, 17, 64, 100, 128, 192, 256, 257, 512]
# each size of keys with the same and with another size of values
PAIRS = [(dk, dv) for i, dk in enumerate(SIZES) for dv in (dk, SIZES[i - 5])]
DECAYS = (None, "bth", "bthk")


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", range(len(PAIRS)))
@pytest.mark.parametrize("operator", [gate_loop, delta_rule, generalized_delta_rule])
def test_head_size(operator, place, dtype):
    dk, dv = PAIRS[place]
    # neighbouring places differ in the kind of decays, lengths and resets
    decay, time, reset = DECAYS[place % 3], (17, 70, 1, 130)[place // 3 % 4], None
    if place % 5 < 3:
        reset = reset_mask(1, time, rate=0.05, device="cuda")
    shape, gates = (1, time, 2, dk, dv), {"dtype": dtype, "seed": place, "log_decay": decay}
    if operator is gate_loop:
        inputs = gate_loop_inputs(*shape, **gates, phase="bth" if place % 4 == 0 else None)
    else:
        make = delta_rule_inputs if operator is delta_rule else generalized_delta_rule_inputs
        inputs = make(*shape, **gates)
    inputs = {name: x if x is None else x.cuda() for name, x in inputs.items()}
    options = {} if reset is None else {"reset": reset}
    if operator is not gate_loop and dtype == torch.float16:
        # corrected values are rounded several times
        dtype = torch.bfloat16
    check_operator(operator, inputs, mode="chunkwise", backend="triton", dtype=dtype, options=options)
