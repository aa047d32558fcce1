"""The chunkwise Triton kernels of matrix states: on a GPU where there is one, else interpreted."""

import pytest
import torch

from linrec.ops import gate_loop, normalized_gate_loop
from linrec.ops.matrix import triton as chunks
from linrec.testing import assert_agree, check_operator, gate_loop_inputs, reset_mask
from tests.tiers import thorough, tiered

from .triton_process import (
    DEVICE,
    INTERPRETED,
    check_two_documents,
    on_a_gpu,
    on_either,
    on_views,
    quiet,
)

pytest.importorskip("triton")
pytestmark = quiet
PAIR = {"mode": "chunkwise", "backend": "triton"}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    # several chunks of few steps, which the interpreter takes a second for
    if INTERPRETED:
        monkeypatch.setattr(chunks, "CHUNK", 16)


def agree(batch, time, heads, dk, dv, *, dtype=torch.float32, options=None, **gates):
    inputs = gate_loop_inputs(
        batch, time, heads, dk, dv, dtype=dtype, seed=time, device=DEVICE, **{"phase": None, **gates}
    )
    check_operator(gate_loop, inputs, **PAIR, dtype=dtype, options=options)


@thorough
@on_either
@pytest.mark.parametrize("log_decay", tiered(["bth", "bthk"], rare=[None, "h", "hk"]))
def test_every_shape_of_the_decays(log_decay):
    reset = reset_mask(2, 37, rate=0.1, device=DEVICE)
    reset[0, 0] = reset[1, -1] = True
    agree(2, 37, 2, 20, 24, log_decay=log_decay, options={"reset": reset})
    agree(1, 20, 1, 3, 5, log_decay=log_decay)


@thorough
@on_either
@pytest.mark.parametrize("log_decay", tiered(["bthk"], ["bth"], ["h", "hk"]))
def test_half_precision_takes_differences_of_sums(log_decay):
    reset = reset_mask(2, 37, rate=0.1, device=DEVICE)
    # the interpreter knows no products of bfloat16
    agree(2, 37, 2, 5, 4, dtype=torch.float16, log_decay=log_decay, options={"reset": reset})


@thorough
@on_either
@pytest.mark.parametrize("phase", tiered([None], rare=["bth"]))
def test_a_bonus_in_half_precision(phase, monkeypatch):
    given = gate_loop_inputs(
        2, 37, 2, 5, 4, dtype=torch.float16, log_decay="bth", phase=phase, bonus=True, device=DEVICE
    )
    options = {"reset": reset_mask(2, 37, rate=0.1, device=DEVICE)}
    check_operator(gate_loop, given, **PAIR, dtype=torch.float16, options=options)
    assert_rounded_once(gate_loop, given, options, monkeypatch)


@thorough
@on_either
@pytest.mark.parametrize("log_decay", tiered(["bth"], rare=["bthk"]))
def test_a_normaliser_in_half_precision(log_decay, monkeypatch):
    given = gate_loop_inputs(
        2, 37, 2, 5, 4, dtype=torch.float16, log_decay=log_decay, phase=None, device=DEVICE
    ) | {"state": None}
    # denominators that are not near zero
    given |= {name: given[name].abs() for name in ("q", "k")}
    options = {"reset": reset_mask(2, 37, rate=0.1, device=DEVICE)}
    check_operator(normalized_gate_loop, given, **PAIR, dtype=torch.float16, options=options)
    assert_rounded_once(normalized_gate_loop, given, options, monkeypatch)


def assert_rounded_once(operator, given, options, monkeypatch):
    """The kernel gets half precision and returns float32, so that only the result is rounded to float16."""
    seen, mixed = [], chunks.Chunks.mixed

    def observed(self, out, *tensors, **named):
        seen.append((self.q.dtype, tensors[0].dtype, out.dtype))
        mixed(self, out, *tensors, **named)

    monkeypatch.setattr(chunks.Chunks, "mixed", observed)
    operator(**given, **options, **PAIR)
    assert seen == [(torch.float16, torch.float16, torch.float32)]


@thorough
@on_either
@pytest.mark.parametrize("phase", tiered(["bth"], rare=[None]))
def test_nothing_passes_a_reset(phase):
    inputs = gate_loop_inputs(1, 20, 1, 3, 2, phase=phase, device=DEVICE)
    names = [name for name in ("q", "k", "v", "log_decay", "phase") if inputs[name] is not None]
    check_two_documents(gate_loop, inputs, names, 10, **PAIR)


@on_either
@pytest.mark.parametrize("log_decay", tiered(["bth"], ["bthk"], [None]))
def test_views_are_read_where_they_are(log_decay, monkeypatch):
    seen, readable = [], chunks.readable
    monkeypatch.setattr(chunks, "readable", lambda x: seen.append(readable(x) is x) or readable(x))
    given = gate_loop_inputs(2, 20, 3, 4, 5, log_decay=log_decay, phase=None, device=DEVICE)
    check_operator(on_views(gate_loop), given, **PAIR, dtype=torch.float32)
    assert seen and all(seen)


def test_layouts():
    x = torch.zeros(2, 5, 3, 4)
    assert chunks.layout(x) == (12, 4)
    assert chunks.layout(x[..., :2]) == (12, 4)
    assert chunks.layout(x[:, :, :1].expand(-1, -1, 7, -1)) == (12, 0)
    assert chunks.layout(x[:, :1]) == (60, 4)
    assert chunks.layout(torch.zeros(2, 5, 3, 8)[..., ::8]) == (24, 8)
    # rows of a batch that do not follow one another, and channels that are not adjacent
    for other in (x[:, :3], x[:1].expand(2, -1, -1, -1), x.transpose(0, 1), x[..., ::2]):
        assert chunks.layout(other) is None
        assert chunks.readable(other).is_contiguous()


@thorough
@on_either
@pytest.mark.parametrize("log_decay", tiered(["bth"], rare=[None]))
@pytest.mark.parametrize("programs", [4, 256])
def test_large_heads_take_large_tiles(log_decay, programs, monkeypatch):
    monkeypatch.setattr(chunks, "PROGRAMS", programs)
    used, tiles = set(), chunks.Chunks._tiles
    monkeypatch.setattr(
        chunks.Chunks, "_tiles", lambda self, name: used.add((name, tiles(self, name))) or tiles(self, name)
    )
    given = gate_loop_inputs(
        1, 20, 1, 256, 257, dtype=torch.float16, log_decay=log_decay, phase=None, device=DEVICE
    )
    check_operator(gate_loop, given, **PAIR, dtype=torch.float16)
    large = {name for name, found in used if found == chunks.LARGE_TILES.get(name)}
    # six blocks of states
    assert large == {"mixed"} | ({"chunk_states"} if programs == 4 else set())


@on_either
@pytest.mark.parametrize("time", tiered([1, 17], [15, 16]))
def test_lengths_around_chunks(time):
    agree(1, time, 2, 4, 4, log_decay="bthk")


@on_either
@pytest.mark.parametrize("log_decay", tiered(["bth"], ["bthk"], [None]))
def test_time_in_one_piece_and_in_two(log_decay, monkeypatch):
    for programs in (1, 2):
        monkeypatch.setattr(chunks, "PROGRAMS", programs)
        agree(1, 70, 1, 4, 4, log_decay=log_decay)


@on_either
@pytest.mark.parametrize(("dk", "dv"), tiered([(40, 1), (16, 33)], [(1, 7), (80, 16)]))
def test_head_sizes(dk, dv):
    agree(1, 18, 1, dk, dv, log_decay="bth")


@on_either
@pytest.mark.parametrize("log_decay", tiered(["bth"], ["bthk"]))
def test_a_magnitude_of_zero_stops_values_and_gives_no_nan(log_decay):
    inputs = gate_loop_inputs(1, 20, 2, 4, 3, log_decay=log_decay, phase=None, device=DEVICE)
    inputs["log_decay"][:, 7] = -torch.inf
    inputs["log_decay"][:, 12, 0] = -torch.inf
    check_operator(gate_loop, inputs, **PAIR, dtype=torch.float32)


@on_either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 2), (2, 5, 0, 2, 2), (2, 0, 3, 2, 2)])
def test_empty_axes(shape, dtype):
    inputs = gate_loop_inputs(*shape, phase=None, dtype=dtype, device=DEVICE)
    y, state = gate_loop(**inputs, **PAIR)
    assert y.shape == (*shape[:3], shape[4]) and state.shape == (shape[0], *shape[2:])


@on_either
def test_gradients_that_are_differentiated_again():
    inputs = gate_loop_inputs(1, 5, 1, 2, 2, phase=None, device=DEVICE)
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items() if tensor is not None}
    names, values = list(inputs), list(inputs.values())

    def penalty(**options):
        y, _ = gate_loop(**dict(zip(names, values, strict=True)), **options)
        gradients = torch.autograd.grad(y.square().sum(), values, create_graph=True, allow_unused=True)
        total = sum(g.square().sum() for g in gradients)
        return torch.autograd.grad(total, values, allow_unused=True)

    assert_agree(penalty(**PAIR), penalty(mode="chunkwise", backend="torch"))


@thorough
@on_either
def test_vmap_folds_the_mapped_axis_into_the_batch():
    q, k, v = torch.randn(3, 2, 1, 9, 2, 4, device=DEVICE)
    log_decay = -torch.rand(2, 1, 9, 2, device=DEVICE)
    mapped, _ = torch.vmap(lambda *x: gate_loop(*x, **PAIR))(q, k, v, log_decay)
    assert_agree(
        mapped, torch.stack([gate_loop(*x, **PAIR)[0] for x in zip(q, k, v, log_decay, strict=True)])
    )


@thorough
@on_either
@pytest.mark.parametrize("phase", tiered(["bthk"], ["h"], ["hk", "bth"]))
def test_phases_turn_twice_as_many_channels(phase):
    reset = reset_mask(2, 37, rate=0.1, device=DEVICE)
    agree(2, 37, 2, 5, 4, log_decay="bth", phase=phase, options={"reset": reset})
    agree(1, 20, 1, 5, 4, log_decay="bthk", phase=phase)


@on_either
def test_complex_queries_and_keys():
    inputs = gate_loop_inputs(1, 20, 2, 4, 3, log_decay="bth", phase=None, complex_qk=True, device=DEVICE)
    check_operator(gate_loop, inputs, **PAIR, dtype=torch.float32)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log_decay", [None, "h", "hk", "bth", "bthk"])
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (256, 96), (24, 200)])
def test_full_heads_on_a_gpu(dtype, log_decay, size):
    reset = reset_mask(2, 1000, rate=0.005, device="cuda")
    agree(2, 1000, 3, *size, dtype=dtype, log_decay=log_decay, options={"reset": reset})


@on_a_gpu
@pytest.mark.parametrize("log_decay", ["bth", "bthk"])
def test_compiles_into_one_graph(log_decay):
    inputs = gate_loop_inputs(2, 100, 2, 32, 32, phase=None, log_decay=log_decay, device="cuda")
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items() if tensor is not None}

    def outcome(function):
        y, last = function(**inputs, **PAIR)
        return y, last, torch.autograd.grad(y.square().sum() + last.sum(), tuple(inputs.values()))

    assert_agree(outcome(torch.compile(gate_loop, fullgraph=True)), outcome(gate_loop))
