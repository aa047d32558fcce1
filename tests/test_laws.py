"""The laws, for every mixer and every operator that exists, found by their files."""

import importlib
import inspect
import math
import pkgutil
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from linrec import mixers, ops, testing
from linrec.ops import (
    delta_rule,
    dense_ssm,
    diagonal_ssm,
    dplr_ssm,
    gate_loop,
    gate_loop_attention,
    laplace_attention,
    long_conv,
    normalized_gate_loop,
    scan,
    selective_scan,
    short_conv,
    softmax_attention,
)
from linrec.testing import (
    check_operator,
    delta_rule_inputs,
    dense_ssm_inputs,
    diagonal_ssm_inputs,
    dplr_ssm_inputs,
    gate_loop_inputs,
    generator,
    long_conv_inputs,
    reset_mask,
    scan_inputs,
    selective_scan_inputs,
    short_conv_inputs,
)
from tests.mixers import variants

D_MODEL = 4
TIMES = (1, 2, 63, 64, 65)
LONG = 16_384
# traces forward and backward, makes no code, and leaves out the search for what is cheap to compute twice
TRACING = "aot_eager_default_partitioner"
# follows the lines of Python alone, in a third of the time: for what differs from another case by its lines
FOLLOWING = "eager"
# the first two form all pairs of steps; the others are a loop over them
LONG_OF_MIXERS = {
    "attention": 1024,
    "gate_loop_attention": 512,
    "ind_rnn": 256,
    "mega": 256,
    "recurrent_delta_net": 256,
    "slstm": 256,
    "sru": 256,
    "srwm": 256,
}
LONG_OF_MODES = {"attention": 1024}

every_mixer = pytest.mark.parametrize(("name", "variant"), variants.cases())
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(name: str, variant: str) -> mixers.Mixer:
    torch.manual_seed(0)
    return mixers.build(name, D_MODEL, **variants.arguments(name, variant))


@every_mixer
def test_laws_of_mixers(name, variant):
    # tracing and long sequences take seconds, so two variants of each mixer have all of them
    place = variants.cases(name).index((name, variant))
    long = LONG_OF_MIXERS.get(name, LONG if place < 2 else 2048)
    compiler = {0: TRACING, 1: FOLLOWING}.get(place)
    testing.check_mixer(make(name, variant), time=9, long=long, compiler=compiler)


@every_mixer
@pytest.mark.parametrize("time", [*TIMES[1:], 1000])
def test_mixers_split_and_reset_at_every_length(name, variant, time):
    mixer = make(name, variant)
    x = torch.randn(2, min(time, LONG_OF_MIXERS.get(name, time)), D_MODEL, generator=generator(time))
    testing.check_split(mixer, x)
    testing.check_reset(mixer, x, reset=reset_mask(2, x.shape[1], rate=3 / time))


# inductor leaves complex operations to eager kernels and says so
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
def test_a_mixer_compiles_to_code_of_any_length():
    mixer = make("gate_loop", "paper")
    testing.check_compile(mixer, torch.randn(2, 9, D_MODEL, generator=generator()), dynamic=None)


@dataclass(frozen=True)
class Operator:
    """An operator, a maker of its inputs of any time, and the arguments of the maker to try, by name."""

    function: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    cases: dict[str, dict[str, Any]]
    over_time: tuple[str, ...]
    # inputs without time that the laws keep, and what every call is given
    kept: tuple[str, ...] = ()
    always: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    # of what the operator checks the values of, the least and the largest
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    # of what is kept, what fits x and the state
    fitted: Callable[..., dict[str, Any]] = lambda kept, x, state: kept
    # steps over which the oracle can be followed: that of softmax attention keeps all pairs for autograd
    long: int = 1000

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return importlib.import_module(self.function.__module__).PAIRS


def attention_inputs(time: int, *, seed: int = 0, **arguments: Any) -> dict[str, Any]:
    before, now = (gate_loop_inputs(2, steps, 2, 3, 2, seed=seed + steps, **arguments) for steps in (5, time))
    for inputs in (before, now):
        del inputs["state"]
    return now | {"state": gate_loop_attention(**before)[1]}


def softmax_inputs(time: int, *, groups: int = 2, **arguments: Any) -> dict[str, Any]:
    inputs = attention_inputs(time, log_decay=None, phase=None, **arguments)
    state = inputs["state"]
    k, v, keys, values = (x[:, :, :groups] for x in (inputs["k"], inputs["v"], state.k, state.v))
    return {"q": inputs["q"], "k": k, "v": v, "state": state._replace(k=keys.to(k), v=values.to(v))}


def feature_inputs(time: int, *, bonus: bool = False, **arguments: Any) -> dict[str, Any]:
    """Inputs whose denominators are sums of features >= 0."""
    inputs = gate_loop_inputs(2, time, 2, 3, 2, phase=None, bonus=bonus, **arguments)
    normaliser = gate_loop_inputs(2, time, 2, 3, 1, phase=None, **arguments)["state"]
    inputs["state"] = torch.cat([inputs["state"], normaliser], dim=-1).abs()
    changed = ("q", "k", "bonus") if bonus else ("q", "k")
    return inputs | {name: inputs[name].abs() for name in changed}


def floored_inputs(time: int, **arguments: Any) -> dict[str, Any]:
    """Inputs whose denominators may be zero, and a floor for each."""
    inputs = gate_loop_inputs(2, time, 2, 3, 3, **arguments)
    floor = 0.1 + torch.rand(2, time, 2, generator=generator(time)).to(inputs["v"])
    return inputs | {"v": inputs["v"][..., :2], "floor": floor}


def cut_kernel(kept: dict[str, Any], x: dict[str, Any], state: Any) -> dict[str, Any]:
    """No more taps than there are inputs."""
    past = 0 if state is None else state.shape[1]
    return kept | {"kernel": kept["kernel"][:, : past + x["u"].shape[1]]}


GATES = {
    "GateLoop": {},
    "GLA": {"phase": None},
    "Mamba-2": {"log_decay": "bth", "phase": None},
    "RetNet with phases": {"log_decay": "h", "phase": "hk"},
    "phases alone": {"log_decay": None, "phase": "bth"},
    "linear attention, complex q and k": {"log_decay": None, "phase": None, "complex_qk": True},
}
OPERATORS = {
    "scan": Operator(
        scan,
        lambda time, **arguments: scan_inputs(2, time, 3, **arguments),
        {
            "per step": {},
            "per head": {"decay": "head"},
            "per channel": {"decay": "channel"},
            "constant": {"decay": "constant"},
            "complex": {"dtype": torch.complex64},
            "complex per channel": {"decay": "channel", "dtype": torch.complex128},
        },
        ("a", "x"),
        options={"reverse": {"reverse": True}},
    ),
    "gate_loop": Operator(
        gate_loop,
        lambda time, **arguments: gate_loop_inputs(2, time, 2, 3, 2, **arguments),
        GATES,
        ("q", "k", "v", "log_decay", "phase"),
    ),
    "gate_loop with bonus": Operator(
        gate_loop,
        lambda time, **arguments: gate_loop_inputs(2, time, 2, 3, 2, bonus=True, **arguments),
        {"GateLoop": {}, "RWKV-6": {"phase": None}},
        ("q", "k", "v", "log_decay", "phase"),
        kept=("bonus",),
        long=200,
    ),
    "normalized_gate_loop": Operator(
        normalized_gate_loop,
        feature_inputs,
        {"linear attention": {"log_decay": None}, "RFA": {"log_decay": "bth"}, "RWKV": {"bonus": True}},
        ("q", "k", "v", "log_decay"),
        options={"floor": {"floor": 0.5}},
    ),
    "normalized_gate_loop with floors": Operator(
        normalized_gate_loop,
        floored_inputs,
        {"GateLoop": {}, "mLSTM": {"log_decay": "bth", "phase": None}},
        ("q", "k", "v", "log_decay", "phase", "floor"),
        always={"signed": False},
        long=200,
    ),
    "delta_rule": Operator(
        delta_rule,
        lambda time, **arguments: delta_rule_inputs(2, time, 2, 3, 2, **arguments),
        {
            "Gated DeltaNet": {},
            "DeltaNet": {"log_decay": None, "largest_beta": 2.0},
            "per key channel": {"log_decay": "bthk", "largest_beta": 2.0},
            "constant": {"log_decay": "h"},
        },
        ("q", "k", "v", "beta", "log_decay"),
        bounds={"beta": (0.0, 2.0)},
    ),
    "selective_scan": Operator(
        selective_scan,
        lambda time, **arguments: selective_scan_inputs(2, time, 4, 3, **arguments),
        {"Mamba": {}, "without D": {"skip": False}, "groups": {"groups": 2}},
        ("x", "dt", "B", "C"),
        kept=("A", "D"),
        bounds={"dt": (0.0, math.inf)},
    ),
    "short_conv": Operator(
        short_conv,
        lambda time, **arguments: short_conv_inputs(2, time, 3, **arguments),
        {"width 4": {}, "width 1": {"width": 1}},
        ("x",),
        kept=("weight", "bias"),
    ),
    "long_conv": Operator(
        long_conv,
        lambda time, **arguments: long_conv_inputs(2, time, 3, **arguments),
        {"taps of all steps": {}, "one tap": {"taps": 1}},
        ("u",),
        kept=("kernel",),
        fitted=cut_kernel,
        long=200,
    ),
    "diagonal_ssm": Operator(
        diagonal_ssm,
        lambda time, **arguments: diagonal_ssm_inputs(2, time, 3, 4, **arguments),
        {"S4D": {}, "EMA": {"is_complex": False}, "DLR": {"shared": True}},
        ("u",),
        kept=("a", "b", "c"),
    ),
    "dense_ssm": Operator(
        dense_ssm,
        lambda time, outputs=2, **arguments: dense_ssm_inputs(2, time, 3, 4, outputs, **arguments),
        {"LSSL": {}, "LMU": {"outputs": None, "shared": True}},
        ("u",),
        kept=("A", "B", "C"),
    ),
    "dplr_ssm": Operator(
        dplr_ssm,
        lambda time, **arguments: dplr_ssm_inputs(2, time, 3, 4, **arguments),
        {"S4": {}, "rank two": {"rank": 2}},
        ("u",),
        kept=("a", "p", "q", "b", "c"),
    ),
    "gate_loop_attention": Operator(
        gate_loop_attention,
        attention_inputs,
        # the gates are those of gate_loop, and this reference is slow
        {name: GATES[name] for name in ("GateLoop", "Mamba-2", "linear attention, complex q and k")},
        ("q", "k", "v", "log_decay", "phase"),
        options={"scale": {"scale": 0.5}},
        long=200,
    ),
    "softmax_attention": Operator(
        softmax_attention,
        softmax_inputs,
        {"Transformer": {}, "multi-query": {"groups": 1}},
        ("q", "k", "v"),
        options={"scale": {"scale": 0.5}, "window": {"window": 7}},
        long=200,
    ),
    "laplace_attention": Operator(
        laplace_attention,
        softmax_inputs,
        {"Mega": {}, "multi-query": {"groups": 1}},
        ("q", "k", "v"),
        options={"scale": {"scale": 0.5}, "window": {"window": 7}, "relu2": {"function": "relu2"}},
        long=200,
    ),
}


def pairs(*, reference: bool = True) -> list[Any]:
    """(operator, mode, backend) of everything that exists; Triton needs a GPU."""
    # a list, since several tests share it: a generator would be empty from the second one on
    listed = []
    for name, operator in OPERATORS.items():
        for mode, backend in operator.pairs:
            if backend != "reference" or reference:
                marks = on_a_gpu if backend == "triton" else []
                listed.append(pytest.param(name, mode, backend, marks=marks, id=f"{name}-{mode}-{backend}"))
    return listed


def device_of(backend: str) -> str:
    return "cuda" if backend == "triton" else "cpu"


every_pair = pytest.mark.parametrize(("name", "mode", "backend"), pairs())
every_fast_pair = pytest.mark.parametrize(("name", "mode", "backend"), pairs(reference=False))


def operators_of(folder: str) -> dict[str, Callable[..., Any]]:
    """What a folder of `linrec.ops` exports and runs in a choice of modes."""
    package = importlib.import_module(f"{ops.__name__}.{folder}")
    # folders without functions hold what operators share
    functions = {name: getattr(package, name) for name in getattr(package, "__all__", ()) if name.islower()}
    return {name: f for name, f in functions.items() if "mode" in inspect.signature(f).parameters}


def test_every_operator_is_listed():
    folders = [operators_of(module.name) for module in pkgutil.iter_modules(ops.__path__) if module.ispkg]
    assert ChainMap(*folders) == {name.split()[0]: operator.function for name, operator in OPERATORS.items()}


def allowed(mode: str, backend: str, reset: Any) -> str:
    """The backend, or "auto" where it refuses the call: Triton's convolutions take no resets."""
    return "auto" if reset is not None and (mode, backend) == ("convolution", "triton") else backend


def agree(
    name: str, mode: str, backend: str, time: int, *, options: dict[str, Any], **arguments: Any
) -> None:
    operator = OPERATORS[name]
    device = device_of(backend)
    inputs = operator.inputs(time, **arguments)
    inputs, options = testing.map_tree(lambda tensor: tensor.to(device), (inputs, options))
    dtype = arguments.get("dtype", torch.float32)
    options = options | operator.always
    backend = allowed(mode, backend, options.get("reset"))
    check_operator(operator.function, inputs, mode=mode, backend=backend, dtype=dtype, options=options)


@every_fast_pair
def test_every_pair_agrees_with_the_float64_reference(name, mode, backend):
    for case in OPERATORS[name].cases.values():
        for time in TIMES:
            agree(name, mode, backend, time, options={}, seed=time, **case)


@every_fast_pair
def test_every_pair_agrees_under_options(name, mode, backend):
    reset = {"reset": reset_mask(2, 65, rate=0.05)}
    for case in OPERATORS[name].cases.values():
        for options in ({}, *OPERATORS[name].options.values()):
            agree(name, mode, backend, 65, options=options | reset, **case)


@every_fast_pair
def test_every_pair_agrees_over_long_sequences(name, mode, backend):
    time = OPERATORS[name].long
    agree(name, mode, backend, time, options={"reset": reset_mask(2, time, rate=0.003)})


@every_pair
def test_every_pair_agrees_in_every_dtype(name, mode, backend):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        agree(name, mode, backend, 65, options={}, dtype=dtype)


def over_time(
    name: str, mode: str, backend: str, time: int, *, options: dict[str, Any] | None = None, **arguments: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The operator as a function of its inputs over time, and such inputs."""
    operator = OPERATORS[name]
    inputs = operator.inputs(time, **arguments)
    del inputs["state"]
    inputs = testing.map_tree(lambda tensor: tensor.to(device_of(backend)), inputs)
    # some cases have inputs that are constant, or None
    x = {key: inputs[key] for key in operator.over_time if inputs[key] is not None and inputs[key].ndim > 2}
    given = {key: inputs[key] for key in inputs if key not in x} | operator.always | (options or {})

    def function(x: Any, state: Any = None, *, reset: Any = None) -> Any:
        kept = operator.fitted(given, x, state)
        x = x | {key: x[key].clamp(*bounds) for key, bounds in operator.bounds.items()}
        chosen = allowed(mode, backend, reset)
        return operator.function(**x, **kept, state=state, reset=reset, mode=mode, backend=chosen)

    return function, x


@every_pair
def test_laws_of_operators(name, mode, backend):
    function, x = over_time(name, mode, backend, 17)
    testing.check_split(function, x)
    testing.check_steps(function, x)
    testing.check_causality(function, x)
    testing.check_batch_independence(function, x)
    testing.check_reset(function, x)
    testing.check_empty(function, x)
    testing.check_layout(function, x)


@every_pair
def test_nothing_passes_a_reset(name, mode, backend):
    operator = OPERATORS[name]
    for case in operator.cases.values():
        testing.check_isolation(*over_time(name, mode, backend, 17, **case))
    for options in operator.options.values():
        if "reverse" not in options:
            testing.check_isolation(*over_time(name, mode, backend, 17, options=options))
    # several chunks, and for scans blocks of blocks
    time = 33 if backend == "reference" else 530 if name == "scan" else 150
    testing.check_isolation(*over_time(name, mode, backend, time))


@every_mixer
def test_nothing_passes_a_reset_of_mixers(name, variant):
    time = min(70, LONG_OF_MIXERS.get(name, 70))
    x = torch.randn(2, time, D_MODEL, generator=generator(time))
    testing.check_isolation(make(name, variant), x)


@every_fast_pair
def test_operators_compile(name, mode, backend):
    function, x = over_time(name, mode, backend, 6)
    # a second entry of an operator runs the same recurrence
    testing.check_compile(function, x, compiler=FOLLOWING if " with " in name else TRACING)


@every_fast_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_stable(name, mode, backend, dtype):
    # a second entry of an operator runs the same recurrence, as an operator of sums over two of another does;
    # and in bfloat16 a loop in Python differs by what goes in and comes out, not by what it adds up over time
    looped = (mode, backend) == ("recurrent", "torch") and (
        dtype == torch.bfloat16 or name == "normalized_gate_loop"
    )
    long = 2048 if " with " in name or looped else LONG
    function, x = over_time(name, mode, backend, min(long, LONG_OF_MODES.get(mode, LONG)))
    time = next(iter(x.values())).shape[1]
    # magnitudes from exactly zero to one within rounding, in every row of steps
    steps = torch.arange(time)
    log_decay = -torch.logspace(-8, 3, 12)[steps % 12]
    log_decay[::1000] = -torch.inf
    for key in ("a", "log_decay"):
        if key in x:
            shaped = log_decay.reshape(-1, *[1] * (x[key].dim() - 2)).expand_as(x[key]).clone()
            x[key] = (shaped if key == "log_decay" else shaped.exp()).to(x[key])
    testing.check_stability(function, {key: tensor.to(dtype) for key, tensor in x.items()})


@pytest.mark.parametrize("name", [name for name in OPERATORS if "attention" not in name])
def test_gradients_are_finite_differences(name):
    operator = OPERATORS[name]
    reset = torch.tensor([[False, False, True, False], [True, False, False, False]])
    cases = operator.cases.values()
    if name == "scan":
        cases = [{"dtype": torch.float64}, {"dtype": torch.complex128}]
    for mode, backend in operator.pairs:
        if backend == "triton":
            continue
        for case in cases:
            for options in ({}, {"reset": reset}, *operator.options.values()):
                inputs = operator.inputs(4, **({"dtype": torch.float64} | case))
                options = options | operator.always
                check_finite_differences(operator.function, inputs, mode=mode, backend=backend, **options)


def check_finite_differences(function: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> None:
    given = {key: tensor.requires_grad_() for key, tensor in inputs.items() if tensor is not None}

    def of(*tensors: torch.Tensor) -> Any:
        return function(**inputs | dict(zip(given, tensors, strict=True)), **options)

    assert torch.autograd.gradcheck(of, tuple(given.values()), fast_mode=True)
