"""The chunkwise Triton kernels of the delta rules: on a GPU where there is one, else interpreted."""

from functools import partial

import pytest
import torch

from linrec.lab.train.fabric import matmul_precision
from linrec.ops import delta_rule, generalized_delta_rule
from linrec.ops.delta_rule import triton
from linrec.ops.matrix import triton as chunks
from linrec.testing import (
    assert_agree,
    check_operator,
    delta_rule_inputs,
    generalized_delta_rule_inputs,
    reset_mask,
)
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
MAKERS = {
    delta_rule: partial(delta_rule_inputs, largest_beta=2.0),
    generalized_delta_rule: generalized_delta_rule_inputs,
}
every_rule = pytest.mark.parametrize("rule", MAKERS)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    # several chunks of few steps, which the interpreter takes a second for
    if INTERPRETED:
        monkeypatch.setattr(chunks, "CHUNK", 16)


def made(rule, *shape, **arguments):
    inputs = MAKERS[rule](*shape, **arguments)
    return {name: x.to(DEVICE) for name, x in inputs.items() if x is not None}


def agree(rule, batch, time, heads, dk, dv, *, dtype=torch.float32, options=None, **arguments):
    inputs = made(rule, batch, time, heads, dk, dv, dtype=dtype, seed=time, **arguments)
    check_operator(rule, inputs, **PAIR, dtype=dtype, options=options)


@thorough
@on_either
@every_rule
def test_nothing_passes_a_reset(rule):
    inputs = made(rule, 1, 20, 1, 3, 2)
    over_time = [name for name in inputs if name != "state"]
    check_two_documents(rule, inputs, over_time, 10, **PAIR)


@thorough
@on_either
@pytest.mark.parametrize("log_decay", tiered(["bth"], ["bthk"], [None, "h", "hk"]))
@every_rule
def test_every_shape_of_the_decays(rule, log_decay):
    reset = reset_mask(2, 37, rate=0.1, device=DEVICE)
    reset[0, 0] = reset[1, -1] = True
    agree(rule, 2, 37, 2, 5, 6, log_decay=log_decay, options={"reset": reset})


@on_either
@pytest.mark.parametrize("log_decay", tiered(["bthk"], [None, "bth"]))
@every_rule
def test_half_precision(rule, log_decay):
    # the interpreter knows no products of bfloat16
    agree(rule, 1, 37, 1, 5, 4, dtype=torch.float16, log_decay=log_decay)


@on_either
def test_programs_of_half_the_width(monkeypatch):
    # two programs of 64 channels become three of 32
    monkeypatch.setattr(chunks, "PROGRAMS", 6)
    agree(delta_rule, 1, 37, 1, 5, 66, dtype=torch.float16, log_decay="bth")


@thorough
@on_either
@pytest.mark.parametrize("log_decay", tiered(["bthk"], rare=[None, "bth"]))
@every_rule
def test_views_are_read_where_they_are(rule, log_decay, monkeypatch):
    seen, readable = [], chunks.readable
    monkeypatch.setattr(chunks, "readable", lambda x: seen.append(readable(x) is x) or readable(x))
    given = made(rule, 2, 20, 3, 4, 5, log_decay=log_decay)
    check_operator(on_views(rule), given, **PAIR, dtype=torch.float32)
    assert seen and all(seen)


@on_either
@pytest.mark.parametrize("time", tiered([1, 17], [16]))
@every_rule
def test_lengths_around_chunks(rule, time):
    agree(rule, 1, time, 2, 4, 3, log_decay="bth")


@thorough
@on_either
@pytest.mark.parametrize(
    ("log_decay", "dk", "dv"), tiered([("bthk", 5, 6)], [("bth", 5, 66)], [(None, 66, 5)])
)
@every_rule
def test_time_in_pieces_of_one_sequence(rule, log_decay, dk, dv, monkeypatch):
    # five chunks, in pieces of two, two and one
    monkeypatch.setattr(chunks, "PROGRAMS", 3 if dv < 66 else 6)
    monkeypatch.setattr(triton, "LEAST_LENGTH", 1)
    reset = reset_mask(1, 5 * chunks.CHUNK - 3, rate=0.03, device=DEVICE)
    agree(rule, 1, reset.shape[1], 1, dk, dv, log_decay=log_decay, options={"reset": reset})


@on_either
@pytest.mark.parametrize("log_decay", [None, "bthk"])
@every_rule
def test_inverses_of_several_blocks(rule, log_decay, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 64)
    agree(rule, 1, 70, 1, 4, 3, log_decay=log_decay)


@thorough
@on_either
def test_vmap_folds_the_mapped_axis_into_the_batch():
    q, k, v = torch.randn(3, 2, 1, 9, 2, 4, device=DEVICE)
    beta, log_decay = torch.rand(2, 1, 9, 2, device=DEVICE), -torch.rand(2, 1, 9, 2, device=DEVICE)
    given = q, torch.nn.functional.normalize(k, dim=-1), v, beta, log_decay
    mapped, _ = torch.vmap(lambda *x: delta_rule(*x, **PAIR))(*given)
    assert_agree(mapped, torch.stack([delta_rule(*x, **PAIR)[0] for x in zip(*given, strict=True)]))


@on_either
@every_rule
def test_double_precision(rule):
    agree(rule, 1, 20, 1, 3, 5, dtype=torch.float64, log_decay="bth")


@on_either
@every_rule
def test_gradients_that_are_differentiated_again(rule):
    inputs = {name: x.requires_grad_() for name, x in made(rule, 1, 5, 1, 2, 2).items()}
    names, values = list(inputs), list(inputs.values())

    def penalty(**options):
        y, _ = rule(**dict(zip(names, values, strict=True)), **options)
        gradients = torch.autograd.grad(y.square().sum(), values, create_graph=True, allow_unused=True)
        total = sum(g.square().sum() for g in gradients)
        return torch.autograd.grad(total, values, allow_unused=True)

    assert_agree(penalty(**PAIR), penalty(mode="chunkwise", backend="torch"))


@on_either
@pytest.mark.parametrize("log_decay", ["hk", "h"])
@every_rule
def test_what_does_not_pass_a_step_has_no_part_in_its_decay(rule, log_decay):
    inputs = made(rule, 1, 1, 1, 8, 4, log_decay=log_decay) | {"state": None}
    inputs["v"] = inputs["v"] * 1e20
    decay = inputs["log_decay"].requires_grad_()
    y, last = rule(**inputs, reset=torch.ones(1, 1, dtype=torch.bool, device=DEVICE), **PAIR)
    (gradient,) = torch.autograd.grad(y.sum() + last.sum(), decay)
    assert gradient.abs().max() == 0


@thorough
@on_either
@every_rule
def test_keys_that_no_program_has_the_memory_for(rule):
    inputs = made(rule, 1, 3, 1, 513, 2, log_decay="bth")
    with pytest.raises(ValueError, match=r"takes keys of at most 512 channels\."):
        rule(**inputs, **PAIR)
    # "auto" takes another pair
    rule(**inputs)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("log_decay", [None, "bth", "bthk"])
# programs of few heads divide time; of 20 heads, they are narrower; of 40, neither
@pytest.mark.parametrize(
    ("heads", "dk", "dv"),
    [(3, 64, 64), (3, 128, 128), (3, 256, 96), (3, 24, 200), (20, 64, 128), (40, 64, 128)],
)
@every_rule
def test_full_heads_on_a_gpu(rule, dtype, log_decay, heads, dk, dv):
    reset = reset_mask(2, 1000, rate=0.005, device="cuda")
    agree(rule, 2, 1000, heads, dk, dv, dtype=dtype, log_decay=log_decay, options={"reset": reset})


@on_a_gpu
@every_rule
def test_wide_heads_of_products_of_ten_bits(rule):
    inputs = made(rule, 2, 130, 2, 136, 136, log_decay="bth")
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    found = []
    with matmul_precision("high"):
        for options in (PAIR, {"mode": "chunkwise", "backend": "torch"}):
            y, state = rule(**inputs, **options)
            total = y.square().sum() + state.sum()
            found.append((y, state, *torch.autograd.grad(total, list(inputs.values()))))
    # as exact as bfloat16, whose eight bits are two fewer
    assert_agree(found[0], found[1], dtype=torch.bfloat16)
