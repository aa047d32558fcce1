import math

import pytest
import torch

from linrec import mixers
from linrec.mixers.infini_attention import InfiniAttention
from linrec.nn import groups_of
from linrec.testing import assert_agree
from tests.tiers import thorough


def build(**arguments):
    torch.manual_seed(0)
    defaults = {"n_heads": 2, "d_head": 4, "segment_length": 4}
    mixer = mixers.build("infini_attention", 6, **(defaults | arguments)).double()
    torch.nn.init.normal_(mixer.beta)
    return mixer


def turn(x, n):
    """R_n of a head's vector (h, d), as complex numbers."""
    d = x.shape[-1]
    angle = torch.tensor([n * 10_000 ** (-2 * j / d) for j in range(d // 2)], dtype=torch.float64)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def sigma(x):
    return torch.where(x > 0, x + 1, x.exp())


def by_steps(mixer, x, begin=0):
    """One row, step by step and head by head, from step `begin` on."""
    T, (h, d) = mixer.segment_length, (mixer.n_heads, mixer.d_head)
    q, k, v = (linear(x).unflatten(-1, (h, d)) for linear in (mixer.q, mixer.k, mixer.v))
    M, z, outputs = torch.zeros(h, d, d).double(), torch.zeros(h, d).double(), []
    gate = mixer.beta.sigmoid()[:, None]
    for i in range(begin, len(x)):
        steps = range(max(begin, i // T * T), i + 1)
        turned = q[i], [k[j] for j in steps]
        if mixer.rotary is not None:
            turned = turn(q[i], i), [turn(k[j], j) for j in steps]
        scores = torch.stack([(turned[0] * key).sum(-1) / math.sqrt(d) for key in turned[1]])
        A = sum(w[:, None] * v[j] for w, j in zip(scores.softmax(0), steps, strict=True))
        if z.any():
            A_mem = torch.stack([sigma(q[i, n]) @ M[n] / (sigma(q[i, n]) @ z[n]) for n in range(h)])
            A = gate * A_mem + (1 - gate) * A
        elif mixer.gate_empty:
            A = (1 - gate) * A
        outputs.append(A.flatten())
        if (i + 1) % T == 0:
            before = M.clone(), z.clone()
            for j in steps:
                for n in range(h):
                    key, value = sigma(k[j, n]), v[j, n]
                    if mixer.update == "delta" and before[1].any():
                        value = value - key @ before[0][n] / (key @ before[1][n])
                    M[n] += torch.outer(key, value)
                    z[n] += key
    return mixer.out(torch.stack(outputs))


@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("gate_empty", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_outputs_are_the_papers_sums(update, gate_empty, positions):
    mixer = build(update=update, gate_empty=gate_empty, positions=positions)
    x = torch.randn(1, 15, 6, dtype=torch.float64)
    with torch.no_grad():
        assert_agree(mixer(x)[0][0], by_steps(mixer, x[0]))
        reset = torch.zeros(1, 15, dtype=torch.bool)
        reset[0, 6] = True
        y, state = mixer(x, reset=reset)
        assert_agree(y[0, 6:], by_steps(mixer, x[0], begin=6))
    assert state.memory.z.shape == (1, 2, 4)


def test_a_delta_update_does_not_store_what_the_memory_holds():
    """With one key for all steps, the memory's value stays the mean of the first segment's."""
    mixer = build(update="delta", positions="none", segment_length=2)
    with torch.no_grad():
        mixer.k.weight.zero_()
        x = torch.randn(1, 4, 6, dtype=torch.float64)
        _, first = mixer(x[:, :2])
        _, second = mixer(torch.cat([x[:, :2], x[:, :2]], 1))
    value = [m.M[0, :, 0] / m.z[0, :, :1] for m in (first.memory, second.memory)]
    assert_agree(value[0], mixer.v(x[0, :2]).mean(0).unflatten(-1, (2, 4)))
    # V - A_mem has a mean of zero, so M stays and z doubles
    assert_agree(second.memory.M, first.memory.M)
    assert_agree(second.memory.z, 2 * first.memory.z)


def test_gradients_pass_through_the_memory_unless_detached():
    x = torch.randn(1, 12, 6, dtype=torch.float64, requires_grad=True)
    for detach, reached in (("never", [0, 1, 2]), ("segment", [2]), (2, [2]), (3, [0, 1, 2])):
        (gradient,) = torch.autograd.grad(build(detach=detach)(x)[0][:, 8:].sum(), x)
        found = [s for s in range(3) if gradient[:, 4 * s : 4 * s + 4].any()]
        assert found == reached


def test_parameters_are_four_projections_and_a_gate_for_each_head():
    mixer = InfiniAttention(256, gate_init=-1.0)
    assert mixer.n_heads == 2
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 256 * 256 + 2
    assert mixer.beta.tolist() == [-1.0, -1.0]
    assert not groups_of(mixer)["beta"].weight_decay
    assert mixer.bfloat16().beta.dtype == torch.float32


@thorough
def test_a_memory_is_in_float32_in_a_mixer_in_bfloat16():
    """Sums of many segments lose small terms in bfloat16."""
    mixer = InfiniAttention(8, segment_length=2).bfloat16()
    _, state = mixer(torch.ones(1, 2048, 8, dtype=torch.bfloat16))
    _, one = mixer(torch.ones(1, 2, 8, dtype=torch.bfloat16))
    assert state.memory.z.dtype == torch.float32
    assert_agree(state.memory.z, 1024 * one.memory.z)


def test_an_unknown_update_is_refused():
    with pytest.raises(ValueError, match="there is no `update` 'delt'; did you mean 'delta'"):
        build(update="delt")


@pytest.mark.parametrize(("name", "value"), [("segment_length", 0), ("eps", 0.0), ("dropout", 1.0)])
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        build(**{name: value})
