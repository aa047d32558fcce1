"""Attention on empty axes, on the meta device, under torch.func, torch.compile and torch.export."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from linrec.ops import AttentionCache, gate_loop_attention, laplace_attention, softmax_attention
from linrec.testing import assert_agree, generator, reset_mask
from linrec.trees import leaves
from tests.tiers import thorough, tiered

OPERATORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gates": (gate_loop_attention, {}),
    "complex": (gate_loop_attention, {}),
    "no gates": (gate_loop_attention, {}),
    "softmax": (softmax_attention, {}),
    "window": (softmax_attention, {"window": 3}),
    "both sides": (softmax_attention, {"causal": False}),
    "laplace": (laplace_attention, {}),
}
# batch, time, heads, key and value channels
FULL = (2, 4, 3, 2, 5)
every_pair = pytest.mark.parametrize(("mode", "backend"), softmax_attention.operator.pairs)
every_operator = pytest.mark.parametrize("name", OPERATORS)


def make(name, sizes, *, seed=0):
    batch, time, heads, d_key, d_value = sizes
    random = generator(seed)
    widths = {"q": d_key, "k": d_key, "v": d_value}
    inputs = {name: torch.randn(batch, time, heads, d, generator=random) for name, d in widths.items()}
    if name in ("gates", "complex"):
        inputs["log_decay"] = -torch.rand(batch, time, heads, d_key, generator=random)
        inputs["phase"] = torch.rand(batch, time, heads, d_key, generator=random)
    if name == "complex":
        inputs |= {letter: torch.complex(inputs[letter], -inputs[letter]) for letter in "qk"}
    return inputs


def with_zero(axis):
    return tuple(0 if place == axis else size for place, size in enumerate(FULL))


@every_pair
@every_operator
@pytest.mark.parametrize("axis", range(5), ids=["batch", "time", "heads", "dk", "dv"])
def test_empty_axes(mode, backend, name, axis):
    attend, options = OPERATORS[name]
    sizes = with_zero(axis)
    batch, time, heads, d_key, d_value = sizes
    # as many steps before, of which there may be none too
    for before, hides in ((time, False), (time, True), (2, True), (0, False)):
        first, second = make(name, (batch, before, *sizes[2:])), make(name, sizes, seed=1)
        for x in (*first.values(), *second.values()):
            x.requires_grad_()
        y, cache = attend(**first, **options, mode=mode, backend=backend)
        assert y.shape == (batch, before, heads, d_value)
        reset = reset_mask(batch, time, rate=0.5) if hides else None
        z, last = attend(**second, **options, state=cache, reset=reset, mode=mode, backend=backend)
        assert (z.shape, z.dtype) == ((batch, time, heads, d_value), torch.float32)
        outputs = [y, z]
        if last is not None:
            kept = before + time if "window" not in options or time == 0 else min(2, before + time)
            assert last.k.shape == (batch, kept, heads, d_key)
            assert last.v.shape == (batch, kept, heads, d_value)
            assert last.alive is None or last.alive.shape == (batch, kept)
            outputs += [x for x in last[:4] if x is not None]
        inputs = [*first.values(), *second.values()]
        for value, wanted in ((sum(x.abs().sum() for x in outputs), inputs), (z.sum(), [*second.values()])):
            gradients = torch.autograd.grad(value, wanted, retain_graph=True)
            assert [x.shape for x in gradients] == [x.shape for x in wanted]
            assert all(x.isfinite().all() for x in gradients)


@every_pair
@every_operator
def test_without_key_channels_all_scores_are_zero(mode, backend, name):
    attend, options = OPERATORS[name]
    inputs = make(name, with_zero(3))
    reset = torch.tensor([[False, False, True, False], [False] * 4])
    y, cache = attend(**inputs, **options, reset=reset, mode=mode, backend=backend)
    z, _ = attend(**inputs, **options, state=cache, mode=mode, backend=backend)
    v = inputs["v"]
    if cache is not None:
        v, y = torch.cat([v, v], 1), torch.cat([y, z], 1)
    documents = functional.pad(reset, (0, v.shape[1] - 4)).cumsum(1)
    step = torch.arange(v.shape[1])
    ages = step[:, None] - step
    seen = (documents[:, :, None] == documents[:, None]) & (ages.abs() < options.get("window", 8))
    seen = (seen if cache is None else seen & (ages >= 0)).float()
    weights = 1 / seen.sum(-1, keepdim=True)
    if name == "laplace":
        # f(0): mu / (sigma sqrt(2)) is the root of pi
        weights = 0.5 * torch.erfc(torch.tensor(torch.pi).sqrt())
    assert_agree(y, torch.einsum("bnm,bmhd->bnhd", weights * seen, v))


def test_long_windows_without_key_channels():
    inputs = make("softmax", (2, 300, 3, 0, 5))
    y, cache = softmax_attention(**inputs, window=2)
    v = inputs["v"]
    assert_agree(y[:, 1:], (v[:, 1:] + v[:, :-1]) / 2)
    assert cache.k.shape == (2, 1, 3, 0)
    assert softmax_attention(**make("softmax", (2, 300, 3, 2, 0)), window=2)[0].shape == (2, 300, 3, 0)
    assert softmax_attention(**make("softmax", (0, 300, 3, 2, 5)), window=2)[0].shape == (0, 300, 3, 5)


@thorough
@every_pair
@every_operator
def test_meta_tensors(mode, backend, name):
    attend, options = OPERATORS[name]
    inputs = make(name, FULL)
    expected, cache = attend(**inputs, **options, mode=mode, backend=backend)
    reset = reset_mask(2, 4, rate=0.5)
    for state, hides in ((None, None), (cache, None), (cache, reset)):
        expected = attend(**inputs, **options, state=state, reset=hides, mode=mode, backend=backend)
        on_meta = [None if x is None else x.to("meta") for x in (*(state or ()), hides)]
        found = attend(
            **{name: x.to("meta") for name, x in inputs.items()},
            **options,
            state=None if state is None else AttentionCache(*on_meta[:5]),
            reset=on_meta[-1],
            mode=mode,
            backend=backend,
        )
        for mine, other in zip(leaves(found), leaves(expected), strict=True):
            assert (mine.shape, mine.dtype, mine.device.type) == (other.shape, other.dtype, "meta")


@every_operator
def test_vmap_is_a_loop(name):
    attend, options = OPERATORS[name]
    several = [make(name, FULL, seed=seed) for seed in range(3)]
    stacked = {key: torch.stack([inputs[key] for inputs in several]) for key in several[0]}
    reset = reset_mask(2, 4, rate=0.3)
    for hides in (None, reset):

        def run(inputs, hides=hides):
            y, cache = attend(**inputs, **options, reset=hides)
            return leaves((y, cache))

        found = torch.func.vmap(run)(stacked)
        for place, mine in enumerate(found):
            assert_agree(mine, torch.stack([run(inputs)[place] for inputs in several]))


@thorough
@pytest.mark.parametrize("name", tiered(["softmax"], [name for name in OPERATORS if name != "softmax"]))
def test_compiled_and_exported(name):
    attend, options = OPERATORS[name]
    inputs = make(name, FULL)
    _, cache = attend(**inputs, **options)
    reset = reset_mask(2, 4, rate=0.3)

    def run(inputs, cache, reset):
        return attend(**inputs, **options, state=cache, reset=reset)

    class Program(torch.nn.Module):
        def forward(self, inputs, cache, reset):
            return run(inputs, cache, reset)

    expected = leaves(run(inputs, cache, reset))
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Program(), (inputs, cache, reset)).module()
    for function in (compiled, exported):
        for mine, other in zip(leaves(function(inputs, cache, reset)), expected, strict=True):
            assert_agree(mine, other)


@every_operator
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_is_no_dense_tensor_is_refused(name, backend):
    attend, options = OPERATORS[name]
    inputs = make(name, FULL)
    for changed in ("q", "k", "v"):
        for wrong in (None, inputs[changed].tolist()):
            with pytest.raises(TypeError, match=f"`{changed}` must be a tensor; got "):
                attend(**inputs | {changed: wrong}, **options, backend=backend)
        with pytest.raises(TypeError, match=f"`{changed}` must be a dense tensor; got torch.sparse_coo"):
            attend(**inputs | {changed: inputs[changed].to_sparse()}, **options, backend=backend)
    with pytest.raises(TypeError, match="`reset` must be a tensor or None; got list"):
        attend(**inputs, **options, reset=[[False] * 4] * 2, backend=backend)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"k": None}, TypeError, "`state.k` must be a tensor; got None"),
        ({"alive": [True]}, TypeError, "`state.alive` must be a tensor or None; got list"),
        ({"v": torch.zeros(2, 1, 3, 5).to_sparse()}, TypeError, "`state.v` must be a dense tensor"),
        ({"k": torch.zeros(2, 1, 3, 2, device="meta")}, ValueError, "`state.k` must be on the device of `k`"),
        (
            {"alive": torch.ones(2, 1, device="meta")},
            ValueError,
            "`state.alive` must be on the device of `k`",
        ),
    ],
)
def test_caches_that_do_not_fit(changed, error, words):
    inputs = make("softmax", FULL)
    cache = AttentionCache(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 5), None, None, None)
    for attend in (softmax_attention, laplace_attention, gate_loop_attention):
        with pytest.raises(error, match=words):
            attend(**inputs, state=cache._replace(**changed))
