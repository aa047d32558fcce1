"""What every mixer refuses and tells the optimiser, whatever it computes."""

import copy
import importlib
import inspect
import itertools
import math
import re
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linrec import mixers
from linrec.nn import groups_of
from linrec.nn.channel_mixing import PositionWise
from linrec.ops.core.call import recording
from linrec.trees import leaves, map_tree
from tests.mixers import variants
from tests.tiers import tiered

TIME = 5
RESETS = {
    "one row": (torch.zeros(TIME, dtype=torch.bool), ValueError, "(batch, time) = (2, 5); got (5,)"),
    "one row for all": (torch.zeros(1, TIME, dtype=torch.bool), ValueError, "got (1, 5)"),
    "another length": (torch.zeros(2, TIME + 1, dtype=torch.bool), ValueError, "got (2, 6)"),
    "numbers": (torch.zeros(2, TIME), TypeError, "`reset` must be bool; got torch.float32"),
}


# the base class checks what all mixers are given
FAMILIES = variants.firsts_of_families()
BY_THE_BASE_CLASS = pytest.mark.parametrize(("name", "variant"), tiered(FAMILIES[:1], FAMILIES[1:]))


@pytest.mark.parametrize("kind", RESETS)
@BY_THE_BASE_CLASS
def test_a_reset_that_would_broadcast_is_refused(name, variant, kind):
    reset, error, message = RESETS[kind]
    mixer = mixers.build(name, 4, **variants.arguments(name, variant))
    with pytest.raises(error) as raised:
        mixer(torch.zeros(2, TIME, 4), reset=reset)
    assert "`reset`" in str(raised.value) and message in str(raised.value)


@BY_THE_BASE_CLASS
def test_a_state_of_other_rows_is_refused(name, variant):
    mixer = mixers.build(name, 4, **variants.arguments(name, variant))
    with pytest.raises(ValueError, match=r"`state.* must (be|have)"):
        mixer(torch.zeros(2, TIME, 4), mixer.init_state(3))
    with pytest.raises(ValueError, match=r"`state.* must (be|have)"):
        mixer(torch.zeros(2, TIME, 4), mixer.init_state(1))


def test_a_mixer_that_sees_later_steps_refuses_a_state():
    arguments = [(name, variants.arguments(name, variant)) for name, variant in variants.cases()]
    arguments += [
        (name, {"causal": False})
        for name in mixers.names()
        if "causal" in inspect.signature(mixers.get(name)).parameters
    ]
    seeing = [mixer for name, given in arguments if not (mixer := mixers.build(name, 4, **given)).is_causal]
    known = {"AFT", "Attention", "FNet", "GMLP", "LinearAttention", "Linformer", "Reformer", "Synthesizer"}
    assert {type(mixer).__name__ for mixer in seeing} >= known
    for mixer in seeing:
        for state in (torch.zeros(2, 4), ()):
            with pytest.raises(ValueError, match=f"`state` must be None for {type(mixer).__name__}"):
                mixer(torch.zeros(2, 4, 4), state)


@pytest.mark.parametrize("name", variants.OF_FAMILIES)
def test_inputs_that_are_no_sequences_are_refused(name):
    mixer = mixers.build(name, 4, **variants.arguments(*variants.cases(name)[0]))
    with pytest.raises(ValueError, match=r"`x` must have shape .* = \(batch, time, 4\)"):
        mixer(torch.zeros(TIME, 4))
    with pytest.raises(TypeError, match=r"`x` must be of a real floating dtype; got torch\.int64"):
        mixer(torch.zeros(2, TIME, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", variants.OF_FAMILIES)
def test_what_is_no_tensor_of_the_weights_dtype_is_refused_in_one_line(name):
    mixer = mixers.build(name, 4, **variants.arguments(*variants.cases(name)[0]))
    x = torch.zeros(2, TIME, 4)
    for given, expected in (
        (
            {"x": x.double()},
            r"`x` must have the dtype of the weights of \w+, torch\.float32; got torch\.float64",
        ),
        ({"x": x.tolist()}, "`x` must be a tensor; got .* of type list"),
        ({"x": x.numpy()}, "`x` must be a tensor; got .* of type ndarray"),
        ({"x": x, "reset": [[False] * TIME] * 2}, "`reset` must be a tensor; got .* of type list"),
    ):
        with pytest.raises(TypeError, match=f"^{expected}"):
            mixer(**given)
    for state in (3, "h", [torch.zeros(2)]):
        with pytest.raises(ValueError, match=r"^`state.* must be .*; got .* of type (int|str|list)"):
            mixer(x, state)
    mixer.double()(x.double())


BAD = (math.nan, -1, 0, 1.5, "x", None, True, math.inf, -math.inf, [], np.int64(2))


def choices(hint):
    """The values of a choice of strings, and none of other types."""
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if isinstance(value, str)]
    return [value for part in get_args(hint) for value in choices(part)]


@pytest.mark.parametrize("name", tiered(variants.OF_FAMILIES, mixers.names()))
def test_an_argument_works_or_is_refused_by_name(name):
    hints = get_type_hints(mixers.get(name).__init__)
    for argument, value in itertools.product(inspect.signature(mixers.get(name)).parameters, BAD):
        try:
            mixer = mixers.get(name)(**{"d_model": 8, argument: value})
        except (TypeError, ValueError) as error:
            named = f"`{argument}`" in str(error) or repr(argument) in str(error)
            assert named and "\n" not in str(error), (argument, value, error)
            continue
        assert value != "x" or not choices(hints.get(argument)), (argument, "is not refused")
        y, _ = mixer(torch.randn(1, 3, mixer.d_model))
        assert y.isfinite().all(), (argument, value)


class Quoted(mixers.Mixer):
    def __init__(self, d_model: "int", *, gate: "Literal['open', 'shut']" = "open", of: "Unknown" = 1):  # noqa: F821
        super().__init__(d_model)


def test_annotations_that_are_strings_are_checked_where_they_can_be_evaluated(monkeypatch):
    Quoted(4, gate="no annotation is checked where one is of an unknown type")
    monkeypatch.setitem(globals(), "Unknown", int)
    Quoted(4, gate="shut", of=2)
    with pytest.raises(ValueError, match="`gate` 'shot'; did you mean 'shut'"):
        Quoted(4, gate="shot")
    with pytest.raises(TypeError, match="`of` must be an integer; got 'x'"):
        Quoted(4, of="x")


# matrices that are not the weight of a linear layer
OTHER_MATRICES = {
    # maps vectors over time
    "gmlp": {"W_s"},
    "aft": {"position_q", "position_k"},
    "antisymmetric_rnn": {"M"},
    "block_state": {f"filters.{f}.C" for f in range(3)},
    "lipschitz_rnn": {"M_A", "M_W"},
    "lru": {"C"},
    "noisy_rnn": {"M_A", "M_W"},
    "s5": {"C"},
    "s5_hyena": {"systems.0.C", "systems.1.C"},
}


@pytest.mark.parametrize(("name", "variant"), variants.of_mixers())
def test_what_muon_takes_for_a_matrix_maps_vectors(name, variant):
    mixer = mixers.build(name, 4, **variants.arguments(name, variant))
    groups = groups_of(mixer)
    taken = {key for key, p in mixer.named_parameters() if p.ndim == 2 and groups[key].name == "default"}
    layers = nn.Linear, PositionWise
    recurrent = [key for key, module in mixer.named_modules() if isinstance(module, nn.RNNBase)]
    linear = {f"{key}.weight" for key, module in mixer.named_modules() if isinstance(module, layers)}
    linear |= {f"{key}.weight_{of}_l0" for key in recurrent for of in ("ih", "hh")}
    assert taken <= linear | OTHER_MATRICES.get(name, set())


class OnTheDevice(TorchFunctionMode):
    """Refuses what a GPU would have to be waited for, which a CUDA graph cannot hold."""

    waits = (
        torch.tensor,
        torch.as_tensor,
        Tensor.new_tensor,
        Tensor.item,
        Tensor.tolist,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.nonzero,
    )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in self.waits, f"{function.__name__} moves numbers between host and device"
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("name", "variant"), variants.of_mixers())
def test_no_numbers_move_between_host_and_device(name, variant, monkeypatch):
    # on the CPU alone, the values of beta and of steps are looked at
    for checks in ("nn.mixer", "ops.delta_rule", "ops.core.checks", "hippo.discretization"):
        module = importlib.import_module(f"linrec.{checks}")
        monkeypatch.setattr(module, "visible", lambda values: False)
    mixer = mixers.build(name, 4, **variants.arguments(name, variant))
    x, reset = torch.randn(2, TIME, 4).requires_grad_(), torch.zeros(2, TIME, dtype=torch.bool)
    _, state = mixer(x)
    times = {"dt": torch.rand(2, TIME) + 0.5} if mixer.takes_dt else {}
    # the first call builds a mixer, once
    mixer.init_state(2)
    with OnTheDevice():
        # a memory across a stack starts each segment within a training step
        mixer.init_state(2)
        y, _ = mixer(x, state, reset=reset, **times)
        y.sum().backward()


@pytest.mark.parametrize(("name", "variant"), variants.of_mixers())
def test_a_state_keeps_no_memory_of_the_steps_that_made_it(name, variant):
    mixer = mixers.build(name, 4, **variants.arguments(name, variant))
    _, state = mixer(torch.randn(2, 50, 4))
    for tensor in leaves(state):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, tuple(tensor.shape)


@pytest.mark.parametrize(("name", "variant"), variants.of_mixers())
def test_a_state_that_does_not_grow_has_one_size_after_some_steps(name, variant):
    mixer = mixers.build(name, 4, **variants.arguments(name, variant))
    sizes, state = [], None
    with torch.no_grad():
        # more steps than the windows of the variants have
        for _ in range(3):
            _, state = mixer(torch.randn(1, 24, 4), state)
            sizes.append(sum(tensor.numel() for tensor in leaves(state)))
    assert sizes[1] == sizes[2] or mixer.state_grows or mixer.segment_length is not None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("attention", {"window": 3}),
        ("mega", {"chunk_size": 3}),
        ("falcon_h1", {"attention": {"n_heads": 2, "window": 3}}),
    ],
)
def test_a_state_grows_without_a_window(name, arguments):
    without = {"attention": {"n_heads": 2}} if name == "falcon_h1" else {}
    assert mixers.build(name, 8, **without).state_grows
    assert not mixers.build(name, 8, **arguments).state_grows
    assert not mixers.build("transformer_xl", 8).state_grows
    assert not mixers.build("trans_normer", 8, block_size=3).state_grows


@pytest.mark.parametrize("dtype", tiered([torch.bfloat16], [torch.float64]))
@pytest.mark.parametrize(("name", "variant"), variants.of_mixers())
def test_states_and_outputs_have_the_dtypes_that_init_state_and_inputs_have(name, variant, dtype):
    mixer = mixers.build(name, 4, **variants.arguments(name, variant)).to(dtype)
    y, state = mixer(torch.randn(2, TIME, 4, dtype=dtype))
    assert y.dtype == dtype
    found = [tensor.dtype for tensor in leaves(state)]
    # a cache may hold more than it starts with
    start = [tensor.dtype for tensor in leaves(mixer.init_state(2))]
    assert start == found[: len(start)]


# outputs that are fed back into their own queries, a network of three layers in each step of the state, and
# exponential gates of large logits; a step near the border of a bucket is hashed to another one
LOOSER = {"recurrent_delta_net": 0.05, "ode_rnn": 0.05, "xlstm_7b": 0.05, "reformer": 0.1}
FIRST = [(name, variants.arguments(*variants.cases(name)[0])) for name in variants.OF_FAMILIES]
RARE = [(name, variants.arguments(name, variant)) for name, variant in variants.cases()]
# defaults; those of rwkv start with outputs of zero
FURTHER = [case for case in RARE if case[0].startswith("rwkv")]
FURTHER += [(name, {}) for name in mixers.names() if not name.startswith("rwkv")]


@pytest.mark.parametrize(("name", "arguments"), tiered(FIRST, FURTHER, RARE))
def test_a_mixer_in_bfloat16_computes_what_it_does_in_float32(name, arguments):
    torch.manual_seed(0)
    mixer = mixers.build(name, 64, **arguments).eval()
    x = torch.randn(1, 1024, 64).bfloat16()
    with torch.no_grad():
        expected, found = mixer(x.float())[0], mixer.bfloat16()(x)[0]
    # about ten roundings by 2^-9 each; one decay or phase in bfloat16 makes it up to tens of percent
    assert (found - expected).norm() < LOOSER.get(name, 0.02) * expected.norm()


MODAL = [name for name in mixers.names() if "mode" in inspect.signature(mixers.get(name)).parameters]


@pytest.mark.parametrize("name", MODAL)
def test_an_unknown_mode_is_refused_when_the_mixer_is_made(name):
    with pytest.raises(ValueError, match="called 'recurent'; did you mean 'recurrent'"):
        mixers.build(name, 4, mode="recurent")


STRUCTURES = {
    "in a tuple": lambda state: (state,),
    "more parts": lambda state: (*state, state) if isinstance(state, tuple) else (state, state),
    "fewer parts": lambda state: state[:-1] if isinstance(state, tuple) else (),
    "an axis more": lambda state: map_tree(lambda tensor: tensor[..., None], state),
    "a list": lambda state: [*state],
    "a number": lambda state: 0,
}


@pytest.mark.parametrize("kind", STRUCTURES)
# attention tells apart more, in words of its own; the base class checks all others
@pytest.mark.parametrize(
    "name",
    tiered(["gate_loop", "rwkv4"], [name for name in variants.OF_FAMILIES if name != "attention"]),
)
def test_a_state_of_another_structure_is_refused(name, kind):
    variant = variants.cases(name)[0]
    mixer = mixers.build(name, 4, **variants.arguments(*variant))
    _, state = mixer(torch.zeros(2, TIME, 4))
    with pytest.raises(ValueError, match=rf"`state` must be that of {type(mixer).__name__} for these rows"):
        mixer(torch.zeros(2, TIME, 4), STRUCTURES[kind](state))


def test_what_a_state_should_be_and_what_came():
    mixer = mixers.build("hyena", 4)
    with pytest.raises(ValueError) as error:
        mixer(torch.zeros(2, TIME, 4), (torch.zeros(2, 4), None))
    assert str(error.value) == (
        "`state` must be that of Hyena for these rows, HyenaState(a tensor (2, 2, 12), "
        "(a tensor (2, 0, 4), a tensor (2, 0, 4))), where sizes of 0 may have grown; "
        "got (a tensor (2, 4), None). Pass the state of the previous call, or None."
    )


@pytest.mark.parametrize("name", ["ind_rnn", "sru", "srwm"])
def test_a_state_of_another_width_is_refused(name):
    """Mixers without an operator, whose loop would broadcast it."""
    mixer = mixers.build(name, 4)
    shape = re.escape(str(tuple(mixer.init_state(2).shape)))
    with pytest.raises(ValueError, match=rf"for these rows, a tensor {shape}, .*; got a tensor \(2, 1\)"):
        mixer(torch.zeros(2, 3, 4), torch.zeros(2, 1))


def test_memories_alone_are_no_state_of_an_lmu_with_feedback():
    mixer = mixers.build("lmu", 4, feedback=True, order=3)
    with pytest.raises(ValueError, match=r"for these rows, Memory\(.*; got a tensor \(2, 1, 3\)"):
        mixer(torch.zeros(2, 3, 4), torch.zeros(2, 1, 3))


def test_the_derived_start_follows_the_dtype_and_leaves_the_mixer_alone():
    mixer = mixers.build("delta_net", 4)
    random = torch.get_rng_state()
    for layer in mixer.modules():
        layer.register_forward_pre_hook(lambda *_: pytest.fail("`init_state` runs a layer of the mixer"))
    with recording() as calls:
        tail, S = mixer.init_state(3)
        assert tail.dtype == S.dtype == torch.float32
        assert [part.dtype for part in mixer.double().init_state(3)] == [torch.float64] * 2
    assert not calls and torch.equal(torch.get_rng_state(), random)
    assert [part.device.type for part in copy.deepcopy(mixer).init_state(0, device="meta")] == ["meta"] * 2


def test_a_mixer_whose_equations_read_the_start_has_to_define_it():
    class Endless(mixers.Mixer):
        def mix(self, x, state, reset):
            return x, self.init_state(len(x)) if state is None else state

    with pytest.raises(TypeError, match="Endless must define `init_state`"):
        Endless(4).init_state(2)


DERIVED = [name for name in mixers.names() if mixers.get(name).init_state is mixers.Mixer.init_state]


@pytest.mark.parametrize(
    "name", tiered(["delta_net"], [name for name in DERIVED if name in variants.OF_FAMILIES], DERIVED)
)
def test_a_compiled_program_starts_states_of_a_mixer_that_has_started_none(name):
    mixer = mixers.build(name, 4).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(mixer.init_state, fullgraph=True, backend="aot_eager")
    found, expected = leaves(compiled(3)), leaves(mixer.init_state(3))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert all(map(torch.equal, found, expected))
