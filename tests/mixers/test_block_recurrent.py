import math

import pytest
import torch

from linrec import mixers
from linrec.mixers.block_recurrent import BlockRecurrent, StateGate
from linrec.nn import groups_of
from linrec.testing import assert_agree
from linrec.trees import map_tree


def build(**arguments):
    torch.manual_seed(0)
    defaults = {"n_heads": 2, "d_head": 4, "segment_length": 4, "n_states": 3, "detach": "never"}
    return mixers.build("block_recurrent", 6, **(defaults | arguments)).double()


def attended(q, keys, values, bias=None):
    """Attention of one head's query (d) to keys (n, d), with unnormalised scores."""
    scores = keys @ q / math.sqrt(len(q))
    return (scores if bias is None else scores + bias).softmax(0) @ values


def by_steps(mixer, x, begin=0):
    """One row with `qk_norm="none"` and the fixed gate, step by step and head by head, from `begin` on."""
    W, h, d, N = mixer.segment_length, mixer.n_heads, mixer.d_head, mixer.n_states
    heads = lambda y: y.unflatten(-1, (-1, d))  # noqa: E731
    q_e, k_e, v_e = (heads(linear(x)) for linear in (mixer.q_e, mixer.k_e, mixer.v_e))
    S, outputs = mixer.S_0, []
    for n in range(begin, len(x)):
        embedded = S / (S.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.state_norm.weight + mixer.P
        q_s, k_s, v_s = (heads(linear(embedded)) for linear in (mixer.q_s, mixer.k_s, mixer.v_s))
        block = max(begin, (n // W - 1) * W)
        first = max(block, n - W + 1) if mixer.sliding else block
        seen = slice(first, n + 1)
        bias = [None] * h
        if mixer.bias is not None:
            bias = mixer.bias.w[:, [n - m for m in range(first, n + 1)]]
        own = [attended(q_e[n, i], k_e[seen, i], v_e[seen, i], bias[i]) for i in range(h)]
        cross = [attended(q_e[n, h + i], k_s[:, i], v_s[:, i]) for i in range(h)]
        outputs.append(torch.cat([*own, *cross]))
        if (n + 1) % W == 0:
            seen = slice(block if mixer.write_from == "window" else max(begin, n + 1 - W), n + 1)
            rows = []
            for j in range(N):
                own = [attended(q_s[j, i], k_s[:, i], v_s[:, i]) for i in range(h)]
                cross = [attended(q_s[j, h + i], k_e[seen, i], v_e[seen, i]) for i in range(h)]
                rows.append(mixer.gate.z(torch.cat([*own, *cross])))
            g = torch.sigmoid(mixer.gate.bias)
            S = g * S + (1 - g) * torch.stack(rows)
    return mixer.out(torch.stack(outputs))


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("write_from", ["window", "block"])
@pytest.mark.parametrize("positions", ["t5", "none"])
def test_outputs_are_the_papers_sums(sliding, write_from, positions):
    mixer = build(sliding=sliding, write_from=write_from, positions=positions, qk_norm="none")
    torch.nn.init.normal_(mixer.S_0)
    x = torch.randn(1, 15, 6, dtype=torch.float64)
    with torch.no_grad():
        assert_agree(mixer(x)[0][0], by_steps(mixer, x[0]))
        reset = torch.zeros(1, 15, dtype=torch.bool)
        reset[0, 6] = True
        assert_agree(mixer(x, reset=reset)[0][0, 6:], by_steps(mixer, x[0], begin=6))


def test_unit_queries_and_keys_bound_the_scores():
    """With a scale of zero all keys weigh the same, whatever their lengths are."""
    mixer = build(positions="none")
    with torch.no_grad():
        mixer.scale.zero_()
        x = 100 * torch.randn(1, 4, 6, dtype=torch.float64)
        values = mixer.v_e(x[0]).cumsum(0) / torch.arange(1, 5)[:, None]
        states = mixer.v_s(mixer.state_norm(mixer.S_0) + mixer.P).mean(0).expand(4, -1)
        assert_agree(mixer(x)[0][0], mixer.out(torch.cat([values, states], -1)))


@pytest.mark.parametrize(
    "arguments", [{}, {"configuration": "dual"}, {"gate": "lstm", "configuration": "single"}]
)
def test_learned_states_start_every_sequence(arguments):
    mixer, x = build(**arguments), torch.randn(2, 9, 6, dtype=torch.float64)
    y, _ = mixer(x)
    (gradient,) = torch.autograd.grad(y[0].sum(), mixer.S_0)
    assert gradient.any()
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[0, 5] = True
    _, state = mixer(x[:, :5])
    y, _ = mixer(x[:, 5:], state, reset=reset[:, 5:])
    (after,) = torch.autograd.grad(y[0, :3].sum(), mixer.S_0)
    # the states that the first block wrote are not what the row sees
    assert after.any()
    fresh, _ = mixer(x[:1, 5:], mixer.init_state(1, position=5))
    assert_agree(y[:1], fresh)


def test_gradients_stop_at_every_eighth_block():
    """The paper's segments have 8 blocks, with gradients between blocks and none between segments."""
    torch.manual_seed(0)
    mixer = mixers.build("block_recurrent", 4, segment_length=1, n_states=2).double()
    assert mixer.detach == 8
    x = torch.randn(1, 20, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(x)[0][:, 13].sum(), x)
    reached = gradient[0].any(-1).nonzero().flatten().tolist()
    assert reached == [8, 9, 10, 11, 12, 13]


def test_the_states_reach_beyond_the_window():
    mixer, x = build(), torch.randn(1, 16, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(x)[0][:, 15].sum(), x)
    assert gradient[0].any(-1).all()


def test_parameters_and_initial_values():
    torch.manual_seed(0)
    d, N = 256, 100
    mixer = BlockRecurrent(d, n_states=N)
    assert mixer.n_heads == 2 and mixer.segment_length == 512
    tokens_and_states = 2 * 4 * d * d + 2 * N * d + d
    gate = 2 * d * d + d + d
    assert sum(p.numel() for p in mixer.parameters()) == tokens_and_states + 2 * d * d + gate + 4 * 2 + 2 * 32
    dual = BlockRecurrent(d, n_states=N, configuration="dual", gate="lstm")
    # z and two gates of the heads, a norm, the hidden layer, z and two gates of its units
    of_heads, of_units = 3 * (2 * d * d + d), 3 * (4 * d * d + d)
    gates = of_heads + d + 4 * d * d + of_units
    assert sum(p.numel() for p in dual.parameters()) == tokens_and_states + 2 * d * d + gates + 4 * 2 + 2 * 32
    assert abs(mixer.S_0.std() / 0.1 - 1) < 0.05 and abs(mixer.P.std() - 1) < 0.05


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gate", "gru", "there is no `gate` 'gru'"),
        ("configuration", "skp", "did you mean 'skip'"),
        ("n_states", 0, "`n_states` must be at least 1; got 0. The paper's is 512"),
        ("kv_heads", 3, "`kv_heads` must be"),
    ],
)
def test_arguments_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        build(**{name: value})


def test_heads_of_keys_and_values_are_shared_by_neighbouring_queries():
    few = build(n_heads=4, kv_heads=2)
    all_heads = build(n_heads=4)
    weights = few.state_dict()
    for name in ("k_e", "v_e", "k_s", "v_s"):
        of_heads = weights[f"{name}.weight"].unflatten(0, (2, -1))
        weights[f"{name}.weight"] = of_heads.repeat_interleave(2, 0).flatten(0, 1)
    all_heads.load_state_dict(weights)
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    assert_agree(few(x)[0], all_heads(x)[0])


def calls_of(mixer, layer, run):
    """Return how often a layer is called."""
    count = []
    handle = getattr(mixer, layer).register_forward_hook(lambda *given: count.append(1))
    run()
    handle.remove()
    return len(count)


@pytest.mark.parametrize("layer", ["k_s", "v_s"])
def test_a_block_takes_keys_and_values_of_its_states_once(layer):
    mixer, x = build(), torch.randn(2, 12, 6, dtype=torch.float64)
    assert calls_of(mixer, layer, lambda: mixer(x)) == 3

    def stream():
        state = None
        for n in range(12):
            _, state = mixer(x[:, n : n + 1], state)

    mixer.eval()
    with torch.no_grad():
        assert calls_of(mixer, layer, stream) == 3


def test_keys_of_states_train_their_projection_after_a_call_without_gradients():
    mixer, x = build().eval(), torch.randn(2, 7, 6, dtype=torch.float64)

    def gradient(context):
        with context:
            _, state = mixer(x[:, :6])
        return torch.autograd.grad(
            mixer(x[:, 6:], map_tree(torch.Tensor.detach, state))[0].sum(), mixer.k_s.weight
        )

    assert_agree(gradient(torch.no_grad()), gradient(torch.enable_grad()))


def state_gate(kind, *, tanh=False):
    torch.manual_seed(0)
    return StateGate(4, 3, kind, tanh=tanh).double()


S, H = (torch.randn(2, 5, d, dtype=torch.float64) for d in (3, 4))


@pytest.mark.parametrize("tanh", [False, True])
def test_gates_are_the_papers(tanh):
    fixed, full, lstm = (state_gate(kind, tanh=tanh) for kind in ("fixed", "full", "lstm"))

    def z(gate):
        z = H @ gate.z.weight.T + gate.z.bias
        return z.tanh() if tanh else z

    g = 1 / (1 + torch.exp(-fixed.bias))
    assert_agree(fixed(S, H), g * S + (1 - g) * z(fixed))
    g = 1 / (1 + torch.exp(-(H @ full.gates.weight.T + full.gates.bias + 1)))
    assert_agree(full(S, H), g * S + (1 - g) * z(full))
    logits = H @ lstm.gates.weight.T + lstm.gates.bias
    f, i = 1 / (1 + torch.exp(-logits[..., :3] - 1)), 1 / (1 + torch.exp(-logits[..., 3:] + 1))
    assert_agree(lstm(S, H), f * S + i * z(lstm))


def test_initial_values_are_the_released_ones():
    torch.manual_seed(0)
    gate = StateGate(400, 1000, "lstm")
    # jax divides by the 0.88 that cutting at two standard deviations leaves
    assert gate.gates.weight.abs().max() <= 2 * math.sqrt(0.1 / 400) / 0.8796
    assert abs(gate.gates.weight.std() / math.sqrt(0.1 / 400) - 1) < 0.01
    assert abs(gate.gates.bias.std() / 0.1 - 1) < 0.05
    assert abs(StateGate(4, 10_000, "fixed").bias.std() / 0.1 - 1) < 0.05


def test_gates_are_transitions_without_weight_decay():
    groups = groups_of(state_gate("full"))
    assert {name for name, group in groups.items() if group.name == "transition"} == {
        "gates.weight",
        "gates.bias",
    }
