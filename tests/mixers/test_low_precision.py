"""Under autocast on a GPU, kernels get their sequences in half precision.

Autocast computes more functions in float32 on a GPU than on a CPU, exponentials for example. The test runs on
a CPU with the rules of a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from linrec import mixers
from linrec.ops.core.call import Operator

from .variants import arguments, of_families

# sequences of the operators that multiply matrices or filter; decays and steps stay in float32
SEQUENCES = {"q", "k", "v", "u"}
WIDE = {
    # at beta = 2, a key that is rounded to a norm above 1 makes the state grow
    ("delta_net", "negative eigenvalues"),
    ("gated_delta_net", "negative eigenvalues"),
    ("gated_delta_product", "paper"),
    ("gated_delta_product", "three steps"),
    ("gated_delta_product", "no decay"),
    ("kda", "negative eigenvalues"),
    # keys are products, and denominators are sums of them that may be as small as 1e-6
    ("relit", "AReLiT"),
    ("relit", "two terms"),
    ("relit", "released AReLiT"),
    # conjugate gradients lose their directions in half precision
    ("mesa_net", "paper"),
    # its own norm is in float32 under autocast, as every norm
    ("mega", "released"),
}


# torch's documentation of autocast, "CUDA Ops that can autocast to float32", those of tensors of any rank
FLOAT32 = {
    *("acos", "asin", "cosh", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "log", "log10", "log1p"),
    *(
        "log2",
        "log_softmax",
        "logsumexp",
        "norm",
        "pow",
        "__pow__",
        "__rpow__",
        "prod",
        "reciprocal",
        "rsqrt",
    ),
    *("sinh", "softmax", "softmin", "softplus", "sum", "tan", "group_norm", "layer_norm", "rms_norm"),
}


class RulesOfGPUs(TorchFunctionMode):
    """Computes the functions of `FLOAT32` in float32."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = list(args), dict(kwargs or {})
        if function.__name__ in FLOAT32:
            given = pytree.tree_map_only(torch.Tensor, widened, given)
        return function(*given[0], **given[1])


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


@pytest.mark.parametrize(("name", "variant"), of_families())
def test_sequences_reach_the_kernels_in_half_precision(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, torch.dtype] = {}
    run, depth = Operator.run, 0

    # a handler would make `rotary_gate_loop` run as a complex recurrence
    def observed(self: Operator, inputs: Any, entry: Any) -> Any:
        nonlocal depth
        for field, value in inputs._asdict().items():
            # operators on this machine may widen what they pass on; q of `dplr_ssm` is a parameter
            if depth == 0 and field in SEQUENCES and self.name != "dplr_ssm":
                found[f"{self.name}: {field}"] = value.dtype
        depth += 1
        result = run(self, inputs, entry)
        depth -= 1
        return result

    monkeypatch.setattr(Operator, "run", observed)
    mixer = mixers.build(name, 16, **arguments(name, variant))
    with torch.autocast("cpu", torch.bfloat16), RulesOfGPUs():
        mixer(torch.randn(2, 6, 16, dtype=torch.bfloat16))
    wide = {field for field, dtype in found.items() if dtype != torch.bfloat16}
    assert bool(wide) == ((name, variant) in WIDE), wide
