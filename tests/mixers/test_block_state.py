import math

import pytest
import torch

from linrec import mixers
from linrec.mixers.block_state import BlockState
from linrec.testing import assert_agree


def build(**arguments):
    torch.manual_seed(0)
    defaults = {"n_heads": 2, "d_head": 4, "segment_length": 4}
    return mixers.build("block_state", 6, **(defaults | arguments)).double()


def attended(q, keys, values, bias=None):
    """Attention of one head's query (d) to keys (n, d)."""
    scores = torch.stack([(q * k).sum() / math.sqrt(len(q)) for k in keys])
    return (scores if bias is None else scores + bias).softmax(0) @ values


def filtered(s5, x, begin):
    """Outputs of one linear S5 for one row, step by step in complex numbers, from step `begin` on."""
    Lambda = torch.complex(-s5.A_log.exp(), s5.A_imag)
    Lambdabar = (Lambda * s5.dt_log.exp()).exp()
    B = torch.complex(s5.B[0::2], s5.B[1::2]) * ((Lambdabar - 1) / Lambda)[:, None]
    C = torch.complex(s5.C[:, 0::2], -s5.C[:, 1::2])
    h, outputs = torch.zeros_like(Lambda), []
    for n, u in enumerate(x):
        if n >= begin:
            h = Lambdabar * h + B @ u.to(B.dtype)
        outputs.append(2 * (C @ h).real + s5.D * u)
    return torch.stack(outputs)


def by_steps(mixer, x, integration, begin=0):
    """One row, step by step and head by head, from `begin` on."""
    W, h, d = mixer.segment_length, mixer.n_heads, mixer.d_head
    heads = lambda y: y.unflatten(-1, (-1, d))  # noqa: E731
    q, k, v = (heads(linear(x)) for linear in (mixer.q, mixer.k, mixer.v))
    C = [filtered(s5, x, begin) for s5 in mixer.filters]
    norm = lambda c: c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight  # noqa: E731

    def seen_by(n, i):
        """The context vectors of head i at step n, before the projection."""
        first = n // W * W
        if integration == "multi_filter":
            rows = [c[first - 1] for c in C] if first > begin else list(mixer.C_0)
            return norm(torch.stack(rows)) + mixer.P
        c = C[i if integration == "multi_head" else 0]
        if mixer.n_states is None:
            return norm(c[max(begin, first) : n + 1])
        if first <= begin:
            return norm(mixer.C_0)
        return norm(c[max(begin, first - mixer.n_states) : first])

    outputs = []
    for n in range(begin, len(x)):
        first = n - W + 1 if mixer.sliding else n // W * W
        seen = range(max(begin, first), n + 1)
        bias = None if mixer.bias is None else mixer.bias.w[:, [n - m for m in seen]]
        own, cross = [], []
        for i in range(h):
            own.append(attended(q[n, i], k[seen, i], v[seen, i], None if bias is None else bias[i]))
            weight = mixer.kv_c[i if integration == "multi_head" else 0].weight.unflatten(0, (2, -1, d))
            W_k, W_v = weight[:, 0 if integration == "multi_head" else i]
            c = seen_by(n, i)
            cross.append(attended(q[n, h + i], c @ W_k.T, c @ W_v.T))
        outputs.append(torch.cat([*own, *cross]))
    return mixer.out(torch.stack(outputs))


CASES = [
    ("single_head", None),
    ("multi_head", None),
    ("single_head", 3),
    ("multi_head", 4),
    ("single_head", 6),
    ("multi_filter", 3),
]


@pytest.mark.parametrize(("integration", "n_states"), CASES)
@pytest.mark.parametrize(("sliding", "positions"), [(False, "t5"), (True, "none"), (True, "t5")])
def test_outputs_are_the_papers_sums(integration, n_states, sliding, positions):
    mixer = build(integration=integration, n_states=n_states, sliding=sliding, positions=positions)
    x = torch.randn(1, 15, 6, dtype=torch.float64)
    with torch.no_grad():
        if mixer.bias is not None:
            torch.nn.init.normal_(mixer.bias.w)
        expected, state, pieces = by_steps(mixer, x[0], integration), None, []
        assert_agree(mixer(x)[0][0], expected)
        for piece in x.split([6, 1, 8], 1):
            y, state = mixer(piece, state)
            pieces.append(y[0])
        assert_agree(torch.cat(pieces), expected)
        reset = torch.zeros(1, 15, dtype=torch.bool)
        for begin in (6, 7, 8):
            y, _ = mixer(x, reset=reset.index_fill(1, torch.tensor(begin), True))
            assert_agree(y[0, begin:], by_steps(mixer, x[0], integration, begin=begin))


def reached(mixer, step):
    """The steps that a step's output depends on through the state-space models alone."""
    torch.nn.init.zeros_(mixer.v.weight)
    x = torch.randn(1, 12, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(x)[0][:, step].sum(), x)
    return gradient[0].any(-1).nonzero().flatten().tolist()


def test_filters_are_read_before_the_block():
    # a query depends on its own step
    assert reached(build(n_states=3), 10) == [0, 1, 2, 3, 4, 5, 6, 7, 10]
    assert reached(build(n_states=3), 2) == [2]
    assert reached(build(integration="single_head", n_states=2), 10) == [0, 1, 2, 3, 4, 5, 6, 7, 10]
    assert reached(build(integration="single_head"), 10) == list(range(11))


def test_heads_read_their_own_models():
    mixer = build(integration="multi_head").requires_grad_(False)
    torch.nn.init.zeros_(mixer.v.weight)
    mixer.out = torch.nn.Identity()
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    before, _ = mixer.mix(x, None, None)
    mixer.filters[1].D += 1
    changed = (mixer.mix(x, None, None)[0] != before)[0].any(0).unflatten(0, (4, 4)).any(-1)
    assert changed.tolist() == [False, False, False, True]


@pytest.mark.parametrize(("integration", "n_states"), CASES)
def test_learned_vectors_start_every_sequence(integration, n_states):
    mixer, x = build(integration=integration, n_states=n_states), torch.randn(2, 9, 6, dtype=torch.float64)
    if n_states is None:
        assert mixer.C_0 is None
        return
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[0, 5] = True
    y, _ = mixer(x, reset=reset)
    for step, expected in ((3, True), (5, True), (8, False)):
        (gradient,) = torch.autograd.grad(y[0, step].sum(), mixer.C_0, retain_graph=True)
        assert bool(gradient.any()) is expected
    (gradient,) = torch.autograd.grad(y[1, 5].sum(), mixer.C_0)
    assert not gradient.any()


def test_any_recurrence_is_the_model():
    mixer = build(n_states=2, ssm="gate_loop", ssm_args={"n_heads": 2})
    assert mixer.recurrence == "gate_loop"
    assert all(isinstance(ssm, mixers.get("gate_loop")) for ssm in mixer.filters)


@pytest.mark.parametrize("ssm", ["attention", "transformer_xl"])
def test_a_model_whose_state_grows_is_refused(ssm):
    with pytest.raises(ValueError, match="`ssm` must be a mixer with a state of constant size"):
        build(ssm=ssm)


def test_parameters():
    d = 256
    mixer = BlockState(d)
    assert (mixer.n_heads, mixer.segment_length, len(mixer.filters)) == (2, 512, 32)
    # of four projections of the inputs, two of the context, and one of both attentions
    attention = 4 * d * d + 2 * d * d + 2 * d * d
    # A_log, A_imag and dt_log for 4 entries, B, C and D
    systems = 32 * (3 * 4 + 2 * 8 * d + d)
    assert sum(p.numel() for p in mixer.parameters()) == attention + systems + 2 * 32 * d + d + 2 * 32
    for integration, filters in (("single_head", 1), ("multi_head", 2)):
        mixer = BlockState(d, integration=integration)
        assert len(mixer.filters) == filters and mixer.filters[0].d_state == d // filters
        assert mixer.C_0 is None and mixer.P is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"integration": "multi_headed"}, "did you mean 'multi_head'"),
        ({"ssm": "s55"}, "there is no `ssm` 's55'; did you mean 's5'"),
        ({"n_states": 0}, "`n_states` must be at least 1; got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)
