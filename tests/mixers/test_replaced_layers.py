"""Layers that other libraries wrap, hook, quantise or offload, and states that are cast."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from linrec import mixers
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import ChannelMixing
from linrec.testing import generator
from linrec.trees import leaves, map_tree
from tests.tiers import thorough

from . import variants

WIDTH, TOKENS, TIME = 16, 11, 9
SEGMENTS = {"segment_length": 4}
MODELS: dict[str, dict[str, Any]] = {
    **{f"channel mixing {kind}": {"channel_mixing": kind} for kind in get_args(ChannelMixing)},
    "shared bounds": {"mixer": "hgru", "norm": "rms", "embedding_norm": True},
    "recurrent memory": {"mixer": "attention", "memory": {"kind": "recurrent_memory", **SEGMENTS}},
    "Memformer": {"memory": {"kind": "memformer", **SEGMENTS}},
    "Temporal Latent Bottleneck": {"memory": {"kind": "temporal_latent_bottleneck", **SEGMENTS}},
    "Token Turing Machine": {"memory": {"kind": "token_turing_machine", **SEGMENTS}},
    "enhanced recurrence": {
        "mixer": "transformer_xl",
        "mixer_args": SEGMENTS,
        "memory": {"kind": "enhanced_recurrence", **SEGMENTS},
    },
}
OF_MODELS = [
    pytest.param("model", kind, marks=[thorough] if place % 4 else []) for place, kind in enumerate(MODELS)
]
# FNet has no layers
WITH_LAYERS = [case for case in variants.of_families() if case.values[0] != "fnet"]
each = pytest.mark.parametrize(("name", "variant"), [*WITH_LAYERS, *OF_MODELS])


def make(name: str, variant: str) -> tuple[nn.Module, Tensor]:
    """Return a mixer or a model, and its input."""
    torch.manual_seed(0)
    if name == "model":
        config = ModelConfig(TOKENS, d_model=WIDTH, n_layers=2, **{"mixer": "gla", **MODELS[variant]})
        return LanguageModel(config).eval(), torch.randint(TOKENS, (2, TIME), generator=generator())
    x = torch.randn(2, TIME, WIDTH, generator=generator())
    return mixers.build(name, WIDTH, **variants.arguments(name, variant)).eval(), x


def replaced(module: nn.Module, replace: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a copy in which `replace` has taken the place of every child, inner ones first."""
    copied = copy.deepcopy(module)
    for part in [*copied.modules()]:
        for name, child in [*part.named_children()]:
            setattr(part, name, replace(child))
    return copied


class Adapted(nn.Module):
    """A linear layer and an adapter of low rank, without a weight of its own, as LoRA's layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(0.3 * torch.randn(2, base.in_features, generator=generator(1)))
        self.lora_b = nn.Parameter(0.3 * torch.randn(base.out_features, 2, generator=generator(2)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + (x.to(y.dtype) @ self.lora_a.T @ self.lora_b.T).to(y.dtype)

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += self.lora_b @ self.lora_a
        return self.base


def run(module: nn.Module, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    found: tuple[Tensor, Any] = module(x, state)
    return found


def gradients(module: nn.Module, x: Tensor) -> dict[str, bool]:
    """Return the names of parameters, and whether outputs and states have a gradient of them."""
    y, state = run(module, x)
    tensors = [tensor for tensor in (y, *leaves(state)) if tensor.requires_grad]
    sum(tensor.abs().square().sum() for tensor in tensors).backward()
    return {
        name: p.grad is not None and bool(p.grad.count_nonzero()) for name, p in module.named_parameters()
    }


@each
def test_adapters_around_layers_compute_and_learn(name, variant):
    module, x = make(name, variant)
    adapted = replaced(module, lambda part: Adapted(part) if isinstance(part, nn.Linear) else part)
    merged = replaced(adapted, lambda part: part.merged() if isinstance(part, Adapted) else part)
    expected, _ = run(merged, x)
    scale = expected.abs().max().clamp(min=1).item()
    torch.testing.assert_close(run(adapted, x)[0], expected, rtol=1e-4, atol=1e-4 * scale)
    # the state of the start reads no weights
    torch.testing.assert_close(
        run(adapted, x, adapted.init_state(2))[0], expected, rtol=1e-4, atol=1e-4 * scale
    )
    learned, wanted = gradients(adapted, x), gradients(merged, x)
    for key in learned:
        if key.endswith("lora_b"):
            # a layer without influence on this input has no gradient itself
            assert learned[key] == wanted[key.replace("lora_b", "weight")], key


@each
def test_hooks_of_layers_are_called(name, variant):
    module, x = make(name, variant)
    expected, _ = run(module, x)
    layers = {key: part for key, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Conv1d))}
    seen = set()
    for key, part in layers.items():
        part.register_forward_hook(lambda *_, key=key: seen.add(key))
    torch.testing.assert_close(run(module, x)[0], expected, rtol=1e-4, atol=1e-5)
    if name in variants.SEGMENTED:
        # some layers run at the end of a segment
        run(module, x[:, :1].expand(-1, module.segment_length + 1, -1))
    assert seen == layers.keys()


@each
# torch deprecates its own quantisation, whose modules are as those of its successors
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_int8_layers_are_close(name, variant):
    module, x = make(name, variant)
    small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(module), {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected, found = run(module, x)[0], run(small, x, small.init_state(2))[0]
    assert (found - expected).norm() < 0.15 * expected.norm()


@thorough
@each
def test_offloaded_parameters_change_nothing(name, variant):
    accelerate = pytest.importorskip("accelerate")
    module, x = make(name, variant)
    offloaded = accelerate.cpu_offload(copy.deepcopy(module), execution_device="cpu")
    with torch.no_grad():
        (expected, _), (found, state) = run(module, x), run(offloaded, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        run(offloaded, x[:, :1], state)


@each
def test_a_state_of_another_precision_is_cast(name, variant):
    module, x = make(name, variant)
    dtypes = torch.float32, torch.bfloat16, torch.float64

    def cast(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        return copy.deepcopy(module).to(dtype), x.to(dtype) if x.is_floating_point() else x

    for own in dtypes:
        mine, x_own = cast(own)
        y, state = run(mine, x_own, run(mine, x_own)[1])
        for other in dtypes:
            # the states that bfloat16 keeps in float32 too
            given = map_tree(partial(narrowed, dtype=other), run(*cast(other))[1])
            y_cast, cast_state = run(mine, x_own, given)
            assert y_cast.dtype == y.dtype
            assert [part.dtype for part in leaves(cast_state)] == [part.dtype for part in leaves(state)]


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
