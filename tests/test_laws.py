"""The laws, for every mixer and every operator that exists, found by their files."""

import functools
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
    generalized_delta_rule,
    laplace_attention,
    long_conv,
    nonlinear_scan,
    normalized_gate_loop,
    scan,
    selective_scan,
    short_conv,
    softmax_attention,
)
from linrec.ops.core.backends import Backend
from linrec.ops.core.call import recording
from linrec.testing import (
    check_derivatives,
    check_operator,
    delta_rule_inputs,
    dense_ssm_inputs,
    diagonal_ssm_inputs,
    dplr_ssm_inputs,
    gate_loop_inputs,
    generalized_delta_rule_inputs,
    generator,
    long_conv_inputs,
    nonlinear_scan_inputs,
    reset_mask,
    scan_inputs,
    selective_scan_inputs,
    short_conv_inputs,
)
from linrec.trees import double
from tests.mixers import variants
from tests.ops.entries import canonical, runs
from tests.tiers import nightly, thorough, tiered

# where torch has no rule for vmap, it repeats an operation
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

D_MODEL = 4
# around chunks of 64 steps; a last chunk of almost all its steps is in longer sequences
TIMES = (1, 2, 64, 65)
LONG = 16_384
# traces forward and backward, makes no code, and leaves out the search for what is cheap to compute twice
TRACING = "aot_eager_default_partitioner"
# follows the lines of Python alone, in a third of the time: for what differs from another case by its lines
FOLLOWING = "eager"
# steps of the first tier, enough for decays to reach zero and for sums to overflow
SHORT = 1024
# some form all pairs of steps; the others are a loop over steps, or over segments of four
LONG_OF_MIXERS = {
    "attention": 1024,
    "delta_lstm": 256,
    "gate_loop_attention": 512,
    "gmlp": 1024,
    "hippo_rnn": 256,
    "ind_rnn": 256,
    "mega": 256,
    "r_transformer": 512,
    "recurrent_delta_net": 256,
    "recurrent_positions": 256,
    "rsa": 512,
    "reformer": 1024,
    "slstm": 256,
    "sru": 256,
    "srwm": 256,
    "synthesizer": 1024,
}
LONG_OF_MIXERS |= dict.fromkeys(variants.NONLINEAR, 256) | dict.fromkeys(variants.SEGMENTED, 1024)
LONG_OF_MODES = {"attention": 1024}
# the normaliser may come near zero within many steps: gradients of 130 lose the last digits of float32
ILL_CONDITIONED = {("mlstm", "exponential")}

every_mixer = pytest.mark.parametrize(("name", "variant"), variants.of_mixers())
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(name: str, variant: str) -> mixers.Mixer:
    torch.manual_seed(0)
    return mixers.build(name, D_MODEL, **variants.arguments(name, variant))


@every_mixer
def test_laws_of_mixers(name, variant):
    long = min(SHORT, LONG_OF_MIXERS.get(name, LONG) // 4)
    testing.check_mixer(make(name, variant), time=9, long=long, compiler=None)


def compiled_mixers() -> list[Any]:
    """Two variants of each mixer; in the first tier one of them all.

    An operator compiles in the same way for all its mixers. So one mixer of each family is traced, forward
    and backward, and the others are followed line by line.
    """
    first = variants.cases("attention")[:1]
    cases = [case for name in mixers.names() for case in variants.cases(name)[:2]]
    return tiered(first, variants.of_operators(), cases)


@pytest.mark.parametrize(("name", "variant"), compiled_mixers())
def test_mixers_compile(name, variant):
    traced = (name, variant) in variants.firsts_of_families()
    # loops are unrolled: two segments, and a part of one for the second program, are enough lines to follow
    x = torch.randn(3, 9 if traced else 5, D_MODEL, generator=generator())
    testing.check_compile(make(name, variant), x, compiler=TRACING if traced else FOLLOWING)


def stable_mixers() -> list[Any]:
    """Variants and dtypes; numbers of bfloat16 are as large as those of float32, and less exact."""
    half, single = (
        [(*case, dtype) for case in variants.cases()] for dtype in (torch.bfloat16, torch.float32)
    )
    further = [case for case in half if case[:2] in variants.of_operators()]
    further += [case for case in single if case[:2] in variants.firsts_of_families()]
    return tiered([], further, half + single)


# `check_mixer` tries both dtypes on fewer steps, for every variant
@pytest.mark.parametrize(("name", "variant", "dtype"), stable_mixers())
def test_mixers_are_stable(name, variant, dtype):
    # further variants may form all pairs of steps
    long = LONG if (name, variant) in variants.cases(name)[:2] else 2048
    x = 30 * torch.randn(1, LONG_OF_MIXERS.get(name, long), D_MODEL, generator=generator())
    testing.check_stability(make(name, variant).to(dtype), x.to(dtype))


def lengths_of_mixers() -> list[Any]:
    """Lengths around chunks of 64 steps, where steps are no loop in Python; in the first tier one."""
    loops = {*variants.NONLINEAR, *variants.SEGMENTED}
    first = [(*case, 65) for case in variants.firsts_of_families() if case[0] not in loops]
    # operators have laws of their own, and variants of a mixer mostly call the same one
    further = [(*case, 65) for case in variants.of_operators()]
    further += [(*case, 1000) for case in variants.firsts_of_families()]
    return tiered(
        first, further, [(*case, time) for case in variants.cases() for time in (2, 63, 64, 65, 1000)]
    )


@pytest.mark.parametrize(("name", "variant", "time"), lengths_of_mixers())
def test_mixers_split_and_reset_at_every_length(name, variant, time):
    dtype = torch.float64 if time > 65 and (name, variant) in ILL_CONDITIONED else torch.float32
    mixer = make(name, variant).to(dtype)
    shape = (2, min(time, LONG_OF_MIXERS.get(name, time)), D_MODEL)
    x = torch.randn(shape, generator=generator(time), dtype=dtype)
    if mixer.is_causal:
        testing.check_split(mixer, x)
    testing.check_reset(mixer, x, reset=reset_mask(2, x.shape[1], rate=3 / time))


@thorough
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
    # options of a compiled call of three or four steps
    compiled: dict[str, Any] = field(default_factory=dict)
    # steps over which the oracle can be followed: that of softmax attention keeps all pairs for autograd
    long: int = 1000

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return self.function.operator.pairs

    def call(self, time: int, **arguments: Any) -> dict[str, Any]:
        return self.inputs(time, **arguments) | self.always


def matrix_inputs(time: int, *, heads: tuple[int, int, int] = (2, 3, 2), **arguments: Any) -> dict[str, Any]:
    return gate_loop_inputs(2, time, *heads, **arguments)


def attention_inputs(time: int, *, seed: int = 0, **arguments: Any) -> dict[str, Any]:
    before, now = (gate_loop_inputs(2, steps, 2, 3, 2, seed=seed + steps, **arguments) for steps in (5, time))
    for inputs in (before, now):
        del inputs["state"]
    return now | {"state": gate_loop_attention(**before)[1]}


def softmax_inputs(time: int, *, groups: int = 2, slopes: bool = False, **arguments: Any) -> dict[str, Any]:
    inputs = attention_inputs(time, log_decay=None, phase=None, **arguments)
    state = inputs["state"]
    k, v, keys, values = (x[:, :, :groups] for x in (inputs["k"], inputs["v"], state.k, state.v))
    found = {"q": inputs["q"], "k": k, "v": v, "state": state._replace(k=keys.to(k), v=values.to(v))}
    return found | ({"slopes": torch.tensor([0.5, 0.125]).to(k)} if slopes else {})


def feature_inputs(time: int, *, bonus: bool = False, **arguments: Any) -> dict[str, Any]:
    """Inputs whose denominators are sums of features >= 0."""
    inputs = gate_loop_inputs(2, time, 2, 3, 2, phase=None, bonus=bonus, **arguments)
    normaliser = gate_loop_inputs(2, time, 2, 3, 1, phase=None, **arguments)["state"]
    inputs["state"] = torch.cat([inputs["state"], normaliser], dim=-1).abs()
    changed = ("q", "k", "bonus") if bonus else ("q", "k")
    return inputs | {name: inputs[name].abs() for name in changed}


def floored_inputs(time: int, *, heads: tuple[int, int, int] = (2, 3, 2), **arguments: Any) -> dict[str, Any]:
    """Inputs whose denominators may be zero, and a floor for each.

    Floors are at least 1. A smaller denominator is a difference of terms that are many times larger, whose
    rounding errors in half precision it would amplify.
    """
    h, dk, dv = heads
    inputs = gate_loop_inputs(2, time, h, dk, dv + 1, **arguments)
    floor = 1 + torch.rand(2, time, h, generator=generator(time)).to(inputs["v"])
    return inputs | {"v": inputs["v"][..., :dv], "floor": floor}


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
# kernels of their own for heads of one channel, with real and with complex q and k
MAX_HEADED = {"max-headed GateLoop": {"heads": (3, 1, 1)}}
COMPLEX_MAX_HEADED = {"max-headed, complex q and k": {"heads": (3, 1, 1), "complex_qk": True}}
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
        matrix_inputs,
        GATES | MAX_HEADED | COMPLEX_MAX_HEADED,
        ("q", "k", "v", "log_decay", "phase"),
    ),
    "gate_loop with bonus": Operator(
        gate_loop,
        functools.partial(matrix_inputs, bonus=True),
        {"GateLoop": {}, "RWKV-6": {"phase": None}},
        ("q", "k", "v", "log_decay", "phase"),
        kept=("bonus",),
        long=200,
    ),
    "normalized_gate_loop": Operator(
        normalized_gate_loop,
        feature_inputs,
        {
            "linear attention": {"log_decay": None},
            "RFA": {"log_decay": "bth"},
            "RWKV": {"bonus": True},
        },
        ("q", "k", "v", "log_decay"),
        options={"floor": {"floor": 0.5}},
    ),
    "normalized_gate_loop with floors": Operator(
        normalized_gate_loop,
        floored_inputs,
        {"GateLoop": {}, "mLSTM": {"log_decay": "bth", "phase": None}} | MAX_HEADED | COMPLEX_MAX_HEADED,
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
    "generalized_delta_rule": Operator(
        generalized_delta_rule,
        lambda time, **arguments: generalized_delta_rule_inputs(2, time, 2, 3, 2, **arguments),
        {
            "RWKV-7": {},
            "without decay": {"log_decay": None},
            "per head": {"log_decay": "bth"},
            "constant": {"log_decay": "h"},
        },
        ("q", "k", "v", "r", "w", "log_decay"),
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
    "nonlinear_scan": Operator(
        nonlinear_scan,
        lambda time, gradient="auto", **arguments: (
            nonlinear_scan_inputs(2, time, 4, **arguments) | {"gradient": gradient}
        ),
        {"Elman": {}, "Elman, adjoint loop": {"gradient": "adjoint"}},
        ("x",),
        kept=("cell", "parameters", "gradient"),
        compiled={"max_iterations": 5, "damping": 1e-8},
        long=200,
    ),
    "nonlinear_scan with pairs": Operator(
        nonlinear_scan,
        lambda time, **arguments: nonlinear_scan_inputs(2, time, 3, pairs=True, **arguments),
        {"pairs": {}},
        ("x",),
        kept=("cell", "parameters"),
        compiled={"max_iterations": 5, "damping": 1e-8},
        long=200,
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
    "softmax_attention with slopes": Operator(
        softmax_attention,
        functools.partial(softmax_inputs, slopes=True),
        {"ALiBi": {}, "multi-query": {"groups": 1}},
        ("q", "k", "v"),
        kept=("slopes",),
        options={"window": {"window": 7}},
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


def cases_of(name: str, entry: Backend) -> list[dict[str, Any]]:
    """Return the cases in which a call with the mode and name of an entry runs it."""
    operator = OPERATORS[name]
    table = operator.function.operator
    return [case for key, case in operator.cases.items() if runs(table, entry, canonical_case(name, key))]


@functools.cache
def canonical_case(name: str, case: str) -> Any:
    operator = OPERATORS[name]
    return canonical(operator.function, **operator.call(9, **operator.cases[case]))


def entries(*, reference: bool = True, differentiable: bool = False) -> list[Any]:
    """(operator, entry of its table) where a case reaches the entry; Triton needs a GPU."""
    # a list, since several tests share it: a generator would be empty from the second one on
    listed = []
    for name, operator in OPERATORS.items():
        for entry in operator.function.operator.backends:
            wanted = (reference or entry.name != "reference") and (entry.differentiable or not differentiable)
            if wanted and cases_of(name, entry):
                marks = on_a_gpu if entry.name == "triton" else []
                parts = (name, entry.mode, entry.name, *filter(None, [entry.kernel]))
                listed.append(pytest.param(name, entry, marks=marks, id="-".join(parts)))
    return listed


def device_of(entry: Backend) -> str:
    return "cuda" if entry.name == "triton" else "cpu"


def slower(listed: list[Any], slow: Callable[[Backend], bool]) -> list[Any]:
    """Mark slow entries thorough."""
    marks = [[*case.marks, *([thorough] if slow(case.values[1]) else [])] for case in listed]
    return [pytest.param(*c.values, marks=m, id=c.id) for c, m in zip(listed, marks, strict=True)]


def shortened(listed: list[Any], short: Callable[[Backend], bool], *, whole: bool = True) -> list[Any]:
    """Add whether sequences are short; nightly they are not, unless `whole` is False."""
    cases = []
    for case in listed:
        name, entry = case.values
        cases.append(pytest.param(name, entry, short(entry), marks=case.marks, id=case.id))
        if whole and short(entry):
            marks = [*case.marks, nightly]
            cases.append(pytest.param(name, entry, False, marks=marks, id=f"{case.id}-long"))
    return cases


def is_reference(entry: Backend) -> bool:
    return entry.name == "reference"


def is_loop(entry: Backend) -> bool:
    """Whether an entry is a loop in Python, where all lengths are alike."""
    return (entry.mode, entry.name) == ("recurrent", "torch")


def is_unblocked(entry: Backend) -> bool:
    """Whether an entry runs a sequence in one piece, or step by step in Python."""
    return is_loop(entry) or entry.mode not in ("chunkwise", "scan", "recurrent")


def is_smoother(entry: Backend) -> bool:
    """Whether an entry iterates a Kalman smoother."""
    return entry.mode == "damped"


def is_slow(entry: Backend) -> bool:
    return is_reference(entry) or is_iteration(entry)


def is_iteration(entry: Backend) -> bool:
    """Whether an entry repeats a scan until it converges."""
    return entry.mode in ("newton", "quasi_newton", "damped")


every_entry = pytest.mark.parametrize(("name", "entry"), slower(entries(), is_iteration))
# all lengths are alike in a loop
every_fast_entry = pytest.mark.parametrize(
    ("name", "entry", "short"), shortened(entries(reference=False), is_loop, whole=False)
)
every_entry_with_gradients = pytest.mark.parametrize(("name", "entry"), entries(differentiable=True))


def operators_of(folder: str) -> dict[str, Callable[..., Any]]:
    """What a folder of `linrec.ops` exports and runs in a choice of modes."""
    package = importlib.import_module(f"{ops.__name__}.{folder}")
    # folders without functions hold what operators share
    functions = {name: getattr(package, name) for name in getattr(package, "__all__", ()) if name.islower()}
    return {name: f for name, f in functions.items() if "mode" in inspect.signature(f).parameters}


def test_every_operator_is_listed():
    folders = [operators_of(module.name) for module in pkgutil.iter_modules(ops.__path__) if module.ispkg]
    assert ChainMap(*folders) == {name.split()[0]: operator.function for name, operator in OPERATORS.items()}


@pytest.mark.parametrize(
    "function", list(dict.fromkeys(operator.function for operator in OPERATORS.values()))
)
def test_every_entry_is_reached(function):
    reached = [
        entry
        for name, operator in OPERATORS.items()
        for entry in function.operator.backends
        if operator.function is function and cases_of(name, entry)
    ]
    for entry in function.operator.backends:
        assert entry in reached


def takes(name: str, entry: Backend, inputs: dict[str, Any]) -> bool:
    function = OPERATORS[name].function
    return runs(function.operator, entry, canonical(function, **inputs))


def agree(name: str, entry: Backend, time: int, *, options: dict[str, Any], **arguments: Any) -> None:
    """Law 1, where the entry takes the options: it agrees, and it is what ran."""
    operator = OPERATORS[name]
    inputs, options = operator.inputs(time, **arguments), options | operator.always
    if not takes(name, entry, inputs | options):
        return
    inputs, options = testing.map_tree(lambda tensor: tensor.to(device_of(entry)), (inputs, options))
    with recording() as calls:
        check_operator(
            operator.function,
            inputs,
            mode=entry.mode,
            backend=entry.name,
            dtype=arguments.get("dtype", torch.float32),
            options=options,
            gradients=entry.differentiable,
        )
    assert calls[0].operator is operator.function.operator
    assert calls[0].backend is entry


@every_fast_entry
def test_every_entry_agrees_with_the_float64_reference(name, entry, short):
    for case in cases_of(name, entry):
        for time in (1, 9) if short else TIMES:
            agree(name, entry, time, options={}, seed=time, **case)


@every_fast_entry
def test_every_entry_agrees_under_options(name, entry, short):
    time = 9 if short else 65
    reset = {"reset": reset_mask(2, time, rate=3 / time)}
    for case in cases_of(name, entry):
        for options in ({}, *OPERATORS[name].options.values()):
            agree(name, entry, time, options=options | reset, **case)


@pytest.mark.parametrize(("name", "entry"), slower(entries(reference=False), is_loop))
# five chunks, and blocks of blocks of a scan
@pytest.mark.parametrize("most", tiered([300], [1000]))
def test_every_entry_agrees_over_long_sequences(name, entry, most):
    time = min(most, OPERATORS[name].long)
    options = {"reset": reset_mask(2, time, rate=0.003)}
    agree(name, entry, time, options=options, **cases_of(name, entry)[0])


@pytest.mark.parametrize(
    ("name", "entry", "short"), shortened(slower(entries(), is_smoother), is_loop, whole=False)
)
def test_every_entry_agrees_in_every_dtype(name, entry, short):
    case = cases_of(name, entry)[0]
    # there are no complex numbers in half precision
    for dtype in (torch.float64, *([] if "complex_qk" in case else [torch.bfloat16, torch.float16])):
        agree(name, entry, 9 if short else 65, options={}, **case | {"dtype": dtype})


def over_time(
    name: str,
    entry: Backend,
    time: int,
    *,
    options: dict[str, Any] | None = None,
    case: dict[str, Any] | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The operator as a function of its inputs over time, and such inputs of a case, by default the first."""
    operator = OPERATORS[name]
    inputs = operator.inputs(time, **(cases_of(name, entry)[0] if case is None else case))
    del inputs["state"]
    inputs = testing.map_tree(lambda tensor: tensor.to(device_of(entry)), inputs)
    # some cases have inputs that are constant, or None
    x = {key: inputs[key] for key in operator.over_time if inputs[key] is not None and inputs[key].ndim > 2}
    given = {key: inputs[key] for key in inputs if key not in x} | operator.always | (options or {})

    def function(x: Any, state: Any = None, *, reset: Any = None) -> Any:
        kept = operator.fitted(given, x, state)
        x = x | {key: x[key].clamp(*bounds) for key, bounds in operator.bounds.items()}
        pair = {"mode": entry.mode, "backend": entry.name}
        return operator.function(**x, **kept, state=state, reset=reset, **pair)

    return function, x


def takes_resets(name: str, entry: Backend) -> bool:
    inputs = OPERATORS[name].call(9, **cases_of(name, entry)[0])
    return takes(name, entry, inputs | {"reset": reset_mask(2, 9)})


@every_entry
def test_laws_of_operators(name, entry):
    function, x = over_time(name, entry, 17)
    if entry.differentiable:
        testing.check_split(function, x)
    with torch.no_grad():
        testing.check_steps(function, x)
        testing.check_causality(function, x)
        testing.check_batch_independence(function, x)
        if takes_resets(name, entry):
            testing.check_reset(function, x)
        testing.check_empty(function, x)
        testing.check_layout(function, x)


@pytest.mark.parametrize(
    ("name", "entry", "short"),
    shortened(slower(entries(differentiable=True), is_slow), is_unblocked, whole=False),
)
def test_nothing_passes_a_reset(name, entry, short):
    if not takes_resets(name, entry):
        pytest.skip("it refuses resets")
    # several chunks, and for scans blocks of blocks
    whole = 33 if entry.name == "reference" else 530 if name == "scan" else 150
    time = 17 if short else whole
    testing.check_isolation(*over_time(name, entry, time))


@thorough
@every_entry_with_gradients
def test_nothing_passes_a_reset_in_any_case(name, entry):
    if not takes_resets(name, entry):
        pytest.skip("it refuses resets")
    operator = OPERATORS[name]
    for case in cases_of(name, entry):
        testing.check_isolation(*over_time(name, entry, 17, case=case))
    for options in operator.options.values():
        if "reverse" not in options:
            testing.check_isolation(*over_time(name, entry, 17, options=options))


# `check_mixer` tries the law on fewer steps, for every variant
@pytest.mark.parametrize(("name", "variant"), tiered([], variants.firsts_of_families(), variants.cases()))
def test_nothing_passes_a_reset_of_mixers(name, variant):
    time = min(70, LONG_OF_MIXERS.get(name, 70))
    x = torch.randn(2, time, D_MODEL, generator=generator(time))
    testing.check_isolation(make(name, variant), x)


def compiled_entries() -> list[Any]:
    """Entries with gradients; in the first tier one of each of two operators.

    A second entry of an operator, which runs the same recurrence, is nightly. So are iterations other than
    Newton's: they differ from it by the lines around their scans, and take as long as ten mixers.
    """
    listed, first = [], [scan, gate_loop]
    for case in entries(reference=False, differentiable=True):
        name, entry = case.values
        function = OPERATORS[name].function
        later = nightly if " with " in name or entry.mode in ("quasi_newton", "damped") else thorough
        marks = [*case.marks, *([] if function in first else [later])]
        first = [other for other in first if other is not function]
        listed.append(pytest.param(*case.values, marks=marks, id=case.id))
    return listed


@pytest.mark.parametrize(("name", "entry"), compiled_entries())
def test_operators_compile(name, entry):
    # loops and iterations are traced once for every step
    time = 3 if is_iteration(entry) else 4
    function, x = over_time(name, entry, time, options=OPERATORS[name].compiled)
    # a Kalman smoother takes a minute to trace
    following = " with " in name or is_smoother(entry)
    testing.check_compile(function, x, compiler=FOLLOWING if following else TRACING)


@pytest.mark.parametrize(
    ("name", "entry"),
    slower(entries(reference=False, differentiable=True), lambda entry: is_loop(entry) or is_smoother(entry)),
)
@pytest.mark.parametrize("dtype", tiered([torch.float32], [torch.bfloat16]))
def test_operators_are_stable(name, entry, dtype):
    # a second entry of an operator runs the same recurrence, as an operator of sums over two of another does;
    # and in bfloat16 a loop in Python differs by what goes in and comes out, not by what it adds up over time
    looped = is_loop(entry) and (dtype == torch.bfloat16 or name == "normalized_gate_loop")
    long = 2048 if " with " in name or looped else LONG
    if "complex_qk" in cases_of(name, entry)[0] and dtype == torch.bfloat16:
        pytest.skip("there are no complex numbers in half precision")
    function, x = over_time(name, entry, min(long, LONG_OF_MODES.get(entry.mode, LONG)))
    time = next(iter(x.values())).shape[1]
    # magnitudes from exactly zero to one within rounding, in every row of steps
    steps = torch.arange(time)
    log_decay = -torch.logspace(-8, 3, 12)[steps % 12]
    log_decay[::1000] = -torch.inf
    for key in ("a", "log_decay"):
        if key in x:
            shaped = log_decay.reshape(-1, *[1] * (x[key].dim() - 2)).expand_as(x[key]).clone()
            x[key] = (shaped if key == "log_decay" else shaped.exp()).to(x[key])
    x = {key: tensor if tensor.is_complex() else tensor.to(dtype) for key, tensor in x.items()}
    testing.check_stability(function, x)


@pytest.mark.parametrize(
    ("name", "entry", "short"),
    shortened(slower(entries(reference=False, differentiable=True), is_iteration), lambda entry: True),
)
def test_derivatives_where_inputs_are_computed_from_each_other(name, entry, short):
    operator = OPERATORS[name]
    reset = {"reset": reset_mask(2, 6, rate=0.3)}
    for case in cases_of(name, entry)[:1] if short else cases_of(name, entry):
        for options in [reset] if short or case is not cases_of(name, entry)[0] else [{}, reset]:
            given = double(operator.inputs(6, **case) | operator.always), options
            given, options = testing.map_tree(lambda tensor: tensor.to(device_of(entry)), given)
            if takes(name, entry, given | options):
                pair = {"mode": entry.mode, "backend": entry.name}
                check_derivatives(
                    operator.function, given, **pair, options=options, forward_mode=name == "scan"
                )


@thorough
@pytest.mark.parametrize("name", [name for name in OPERATORS if "attention" not in name])
def test_gradients_are_finite_differences(name):
    operator = OPERATORS[name]
    reset = torch.tensor([[False, False, True, False], [True, False, False, False]])
    for entry in operator.function.operator.backends:
        if entry.name == "triton":
            continue
        cases = cases_of(name, entry)
        if name == "scan":
            cases = [{"dtype": torch.float64}, {"dtype": torch.complex128}]
        for case in cases:
            for options in ({}, {"reset": reset}, *operator.options.values()):
                inputs = operator.inputs(4, **({"dtype": torch.float64} | case))
                options = options | operator.always | {"mode": entry.mode, "backend": entry.name}
                check_finite_differences(operator.function, inputs, **options)


def check_finite_differences(function: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> None:
    tensors = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor)}
    given = {key: tensor.requires_grad_() for key, tensor in tensors.items()}

    def of(*tensors: torch.Tensor) -> Any:
        return function(**inputs | dict(zip(given, tensors, strict=True)), **options)

    assert torch.autograd.gradcheck(of, tuple(given.values()), fast_mode=True)
