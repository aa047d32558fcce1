"""Every operator at the edges: empty axes, arguments that are no dense tensors, tensors without data."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from linrec import ops, testing
from linrec.ops.core.backends import Backend
from linrec.trees import leaves
from tests.ops.entries import canonical, runs
from tests.tiers import nightly, thorough

Sizes = dict[str, int]
Maker = Callable[..., dict[str, Any]]
CHANNELS = {"batch": 2, "time": 5, "channels": 6}
HEADS = {"batch": 2, "time": 5, "heads": 6, "d_key": 3, "d_value": 4}


def normalized_inputs(*, d_value: int, **given: Any) -> dict[str, Any]:
    inputs = testing.gate_loop_inputs(d_value=d_value + 1, bonus=True, **given)
    floor = torch.ones(given["batch"], given["time"], given["heads"]).to(inputs["v"])
    return inputs | {"v": inputs["v"][..., :d_value], "floor": floor}


def gated_inputs(**given: Any) -> dict[str, Any]:
    before, now = (testing.gate_loop_inputs(**given | {"time": time}) for time in (7, given["time"]))
    for inputs in (before, now):
        del inputs["state"]
    return now | {"state": ops.gate_loop_attention(**before)[1]}


def attention_inputs(**given: Any) -> dict[str, Any]:
    """Inputs with a head of keys for two of queries."""
    before, now = (testing.gate_loop_inputs(**given | {"time": time}) for time in (7, given["time"]))
    k, v, keys, values = (x[:, :, ::2] for x in (now["k"], now["v"], before["k"], before["v"]))
    return {"q": now["q"], "k": k, "v": v, "state": ops.AttentionCache(keys, values, None, None, None)}


def nonlinear_inputs(*, gradient: str = "auto", **given: Any) -> dict[str, Any]:
    return testing.nonlinear_scan_inputs(**given) | {"gradient": gradient}


# makers of inputs, and the sizes of the axes that may be empty
OPERATORS: dict[str, tuple[Maker, Sizes]] = {
    "scan": (testing.scan_inputs, CHANNELS),
    "gate_loop": (functools.partial(testing.gate_loop_inputs, bonus=True), HEADS),
    "normalized_gate_loop": (normalized_inputs, HEADS),
    "delta_rule": (testing.delta_rule_inputs, HEADS),
    "generalized_delta_rule": (testing.generalized_delta_rule_inputs, HEADS),
    "selective_scan": (functools.partial(testing.selective_scan_inputs, d_state=4, groups=3), CHANNELS),
    "short_conv": (functools.partial(testing.short_conv_inputs, width=4), CHANNELS),
    "long_conv": (functools.partial(testing.long_conv_inputs, past=7, taps=4), CHANNELS),
    "diagonal_ssm": (functools.partial(testing.diagonal_ssm_inputs, states=4), CHANNELS),
    "dense_ssm": (functools.partial(testing.dense_ssm_inputs, states=4), CHANNELS | {"outputs": 3}),
    "dplr_ssm": (functools.partial(testing.dplr_ssm_inputs, states=4, rank=1), CHANNELS),
    "nonlinear_scan": (nonlinear_inputs, CHANNELS),
    "gate_loop_attention": (functools.partial(gated_inputs, log_decay="bth", phase="bth"), HEADS),
    "softmax_attention": (attention_inputs, HEADS),
    "laplace_attention": (attention_inputs, HEADS),
}
# arguments of the makers that reach other entries
ONE_CHANNEL = {"d_key": 1, "d_value": 1}
OTHERS: dict[str, list[dict[str, Any]]] = {
    name: [ONE_CHANNEL, ONE_CHANNEL | {"complex_qk": True}] for name in ("gate_loop", "normalized_gate_loop")
} | {"nonlinear_scan": [{"gradient": "adjoint"}]}
TABLES = {name: getattr(ops, name).operator for name in OPERATORS}


every_operator = pytest.mark.parametrize("name", OPERATORS)


def test_every_operator_is_listed():
    functions = {name: f for name, f in vars(ops).items() if inspect.isfunction(f)}
    assert OPERATORS.keys() == {
        name for name, f in functions.items() if "mode" in inspect.signature(f).parameters
    }


def reaching(name: str, entry: Backend) -> dict[str, Any]:
    """Return sizes, and what else the maker of inputs needs, for inputs that reach an entry."""
    make, sizes = OPERATORS[name]
    for others in ({}, *OTHERS.get(name, ())):
        if runs(TABLES[name], entry, canonical(getattr(ops, name), **make(**sizes | others))):
            return sizes | others
    raise AssertionError("no inputs reach the entry")


def entries(*names: str) -> Iterator[Any]:
    """Every entry that runs on the CPU, of some backends; references are loops that tests take for right."""
    for name, table in TABLES.items():
        for entry in table.backends:
            if entry.name in names:
                parts = (name, entry.mode, entry.name, *filter(None, [entry.kernel]))
                marks = [thorough] if entry.name == "reference" else []
                yield pytest.param(name, entry, marks=marks, id="-".join(parts))


def outcome(name: str, inputs: dict[str, Any], **options: Any) -> dict[str, list[Tensor]]:
    """Outputs, final state, and gradients of their sums."""
    inputs = testing.differentiable(inputs)
    y, last = getattr(ops, name)(**inputs, **options)
    sums = [x.real.float().sum() for x in leaves((y, last)) if x.requires_grad]
    wanted = [x for x in leaves(inputs) if x.requires_grad]
    return {"y": [y], "state": leaves(last), "gradients": list(torch.autograd.grad(sums, wanted))}


def mask(inputs: dict[str, Any], rate: float | None) -> Tensor | None:
    """Resets, or None for a rate of None."""
    return None if rate is None else testing.reset_mask(*leaves(inputs)[0].shape[:2], rate=rate)


def layouts(found: dict[str, list[Tensor]]) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), x.dtype) for tensors in found.values() for x in tensors]


@thorough
@pytest.mark.parametrize(("name", "entry"), entries("torch", "numba", "reference"))
def test_axes_may_be_empty(name, entry):
    (make, _), given, operator = OPERATORS[name], reaching(name, entry), getattr(ops, name)
    pair = {"mode": entry.mode, "backend": entry.name}
    # an axis of one is there for the entry
    axes = {axis: given[axis] for axis in OPERATORS[name][1] if given[axis] > 1}
    for dtype in (torch.float32, torch.float64 if "complex_qk" in given else torch.bfloat16):
        for axis, size in axes.items():
            inputs, one, two = (make(**given | {axis: n * size}, dtype=dtype) for n in range(3))
            for resets in (None, 0.0):
                options, *of_others = ({"reset": mask(x, resets)} for x in (inputs, one, two))
                found, ones, twos = (
                    outcome(name, x, **options, **pair)
                    for x, options in zip((inputs, one, two), (options, *of_others), strict=True)
                )
                if axis == "time":
                    # the state is handed on as it is
                    testing.assert_agree(found["state"], leaves(inputs["state"]), dtype=dtype)
                    for x, other in zip(found["state"], ones["state"], strict=False):
                        assert x.dtype == other.dtype
                    ones, twos = ({**each, "state": found["state"]} for each in (ones, twos))
                # sizes of results are linear in those of inputs
                assert layouts(found) == [
                    (tuple(2 * a - b for a, b in zip(shape, longer, strict=True)), dtype)
                    for (shape, dtype), (longer, _) in zip(layouts(ones), layouts(twos), strict=True)
                ]
                testing.check_operator(operator, inputs, dtype=dtype, options=options, **pair)
            # a kernel has no more taps than there are inputs
            if (name, axis) != ("long_conv", "time"):
                y, last = operator(**inputs | {"state": None}, **pair)
                assert all(x.isfinite().all() for x in leaves((y, last)))


def arguments(name: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Arguments of a call, and the name and value of each tensor among them."""
    make, sizes = OPERATORS[name]
    given = make(**sizes) | {"reset": testing.reset_mask(sizes["batch"], sizes["time"])}
    for argument, x in given.items():
        if leaves(x):
            yield given, argument, x


@every_operator
def test_what_is_no_dense_tensor_is_refused_by_name(name):
    function = getattr(ops, name)
    for given, argument, x in arguments(name):
        wrong = [[1.0], "x", *([] if argument == "floor" else [1.5])]
        if inspect.signature(function).parameters[argument].default is not None:
            wrong.append(None)
        if isinstance(x, Tensor):
            wrong.append(x.tolist())
        for value in wrong:
            with pytest.raises(TypeError, match=f"`{argument}` must be a"):
                function(**given | {argument: value})
        sparse = testing.map_tree(Tensor.to_sparse, x)
        with pytest.raises(TypeError, match=rf"`{argument}.*` must be a dense tensor; got torch.sparse_coo"):
            function(**given | {argument: sparse})


@every_operator
def test_tensors_on_other_devices_are_refused_by_name(name):
    function, sequence = getattr(ops, name), TABLES[name].sequence
    for given, argument, x in arguments(name):
        named = r"\w+" if argument == sequence else argument
        # a cache is compared with the new keys
        like = sequence if isinstance(x, Tensor) else "k"
        words = rf"`{named}.*` must be on the device of `{like}`, '(cpu|meta)'; got '(cpu|meta)'. Move it"
        with pytest.raises(ValueError, match=words):
            function(**given | {argument: testing.map_tree(lambda x: x.to("meta"), x)})


@thorough
@pytest.mark.parametrize(
    ("name", "entry"),
    [
        # a Kalman smoother that never converges takes as long as all others
        pytest.param(*case.values, id=case.id, marks=nightly if "damped" in case.id else case.marks)
        for case in entries("torch", "reference")
    ],
)
def test_tensors_without_data(name, entry):
    (make, _), sizes = OPERATORS[name], reaching(name, entry)
    for pair in ({"mode": entry.mode, "backend": entry.name}, {}):
        for time in (1, 20):
            inputs = make(**sizes | {"time": time})
            for options in ({}, {"reset": testing.reset_mask(sizes["batch"], time)}):
                given, chosen = testing.map_tree(lambda x: x.to("meta"), (inputs, options))
                found = outcome(name, given, **chosen, **pair)
                assert all(x.is_meta for tensors in found.values() for x in tensors)
                assert layouts(found) == layouts(outcome(name, inputs, **options, **pair))
