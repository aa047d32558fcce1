"""Learners against autograd over the whole stream, and the laws of their interface, in float64."""

import copy
import re

import pytest
import torch
from torch.nn import functional

from linrec import learning, mixers
from linrec.errors import CheckpointError, DivergedError
from linrec.learning import build_learner
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, SequenceClassifierConfig
from linrec.trees import leaves, map_tree
from tests.markdown import ROOT
from tests.tiers import thorough, tiered

ELEMENTWISE = [
    ("lru", {}),
    ("lru", {"forget_gate": True}),
    ("min_gru", {}),
    ("min_lstm", {}),
    ("gilr", {}),
    ("rg_lru", {}),
    ("hgru", {}),
    ("gate_loop", {}),
    ("gate_loop", {"phase_activation": "none"}),
    ("s5", {}),
    ("sru", {}),
    ("qrnn", {}),
    ("ind_rnn", {}),
    ("e_lstm", {}),
]
DENSE = ["elman", "gru", "lstm", "lem", "cornn", "min_gru", "lru"]
T = 32


def stream(width=4, rows=2, steps=T, seed=0, resets=True):
    """Return inputs and targets (b, t, width), and resets in both rows at different places."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, steps, width, dtype=torch.float64, generator=generator)
    reset = torch.zeros(rows, steps, dtype=torch.bool)
    if resets:
        reset[0, steps // 2], reset[-1, steps // 4] = True, True
    return x, y, reset


def mixer_of(name, width=4, **arguments):
    torch.manual_seed(1)
    return mixers.build(name, width, **arguments).double()


def stack_of(name, layers=2, **options):
    torch.manual_seed(1)
    model = LanguageModel(
        ModelConfig(vocab_size=5, d_model=4, n_layers=layers, mixer=name, **options)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def tokens(rows=2, steps=T):
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(5, (2, rows, steps), generator=generator)
    reset = torch.zeros(rows, steps, dtype=torch.bool)
    reset[0, steps // 2] = True
    return x, y, reset


def learnt(learner, x, y, reset, pieces):
    """Return the learner's gradients after a stream in pieces of equal length; 0 is step by step."""
    if pieces == 0:
        for t in range(x.shape[1]):
            learner.step(x[:, t], y[:, t], reset[:, t])
    else:
        for part in zip(*(z.split(pieces, 1) for z in (x, y, reset)), strict=True):
            learner.chunk(*part)
    return learner.gradients()


def assert_equal(found, expected, names=None, tolerance=1e-10):
    for name in expected if names is None else names:
        error = (found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("pieces", tiered([8], [0]))
@pytest.mark.parametrize("name, arguments", ELEMENTWISE)
def test_elementwise_rtrl_is_autograd_of_the_whole_stream(name, arguments, pieces):
    mixer = mixer_of(name, **arguments)
    whole = learnt(build_learner("bptt", mixer), *stream(), T)
    assert_equal(learnt(build_learner("rtrl", mixer), *stream(), pieces), whole)
    # the traces matter: without them gradients differ
    with pytest.raises(AssertionError):
        assert_equal(learnt(build_learner("tbptt", mixer), *stream(), pieces or 1), whole, tolerance=1e-6)


@pytest.mark.parametrize("name", DENSE)
def test_dense_rtrl_is_autograd_of_the_whole_stream(name):
    mixer = mixer_of(name)
    whole = learnt(build_learner("bptt", mixer), *stream(steps=24), 24)
    assert_equal(learnt(build_learner("dense_rtrl", mixer), *stream(steps=24), 0), whole)


def test_dense_rtrl_is_exact_at_any_depth():
    model = stack_of("gru", layers=3)
    whole = learnt(build_learner("bptt", model), *tokens(steps=20), 20)
    assert_equal(learnt(build_learner("dense_rtrl", model), *tokens(steps=20), 10), whole)


def test_one_row_is_exact_too():
    # a row alone needs no weights of its own, and takes another path
    mixer = mixer_of("lru")
    whole = learnt(build_learner("bptt", mixer), *stream(rows=1), T)
    assert_equal(learnt(build_learner("rtrl", mixer), *stream(rows=1), 8), whole)


@pytest.mark.parametrize("name", ["lru", "hgru", "gate_loop"])
@pytest.mark.parametrize("credit", ["chunk", "spatial"])
def test_the_last_recurrent_layer_of_a_stack_is_exact(name, credit):
    model = stack_of(name)
    whole = learnt(build_learner("bptt", model), *tokens(), T)
    found = learnt(build_learner("rtrl", model, credit=credit), *tokens(), 8)
    exact = [
        name for name in whole if name.startswith(("blocks.1.mixer.", "blocks.1.channel", "norm", "head"))
    ]
    assert_equal(found, whole, exact)
    with pytest.raises(AssertionError):
        assert_equal(found, whole, ["blocks.0.channel_mixing.up.weight"], tolerance=1e-6)


@pytest.mark.parametrize("name", tiered(["lru", "gate_loop"], ["min_gru", "rg_lru", "hgru"]))
def test_with_spatial_credit_a_chunk_is_its_steps(name):
    model, given = stack_of(name, layers=3), tokens(steps=12)
    by_steps = learnt(build_learner("rtrl", model, credit="spatial"), *given, 0)
    assert_equal(learnt(build_learner("rtrl", model, credit="spatial"), *given, 5), by_steps)


def test_chunks_add_up_where_a_recurrent_weight_is_clipped():
    mixer = mixer_of("ind_rnn", activation="tanh", gamma=1.0)
    with torch.no_grad():
        mixer.u.copy_(torch.tensor([3.0, -3.0, 0.9, -0.5]))
    whole = learnt(build_learner("bptt", mixer), *stream(), T)
    for pieces in (0, 8):
        assert_equal(learnt(build_learner("rtrl", mixer), *stream(), pieces), whole)


def test_bptt_is_autograd_of_each_sequence_from_the_initial_state():
    mixer, (x, y, reset) = mixer_of("gru"), stream()
    found = learnt(build_learner("bptt", mixer), x, y, reset, 8)
    expected = {name: torch.zeros_like(p) for name, p in mixer.named_parameters()}
    for start in range(0, T, 8):
        part = slice(start, start + 8)
        loss = (mixer(x[:, part], reset=reset[:, part])[0] - y[:, part]).square().mean(2).sum()
        gradients = torch.autograd.grad(loss, [*mixer.parameters()])
        expected = {name: expected[name] + g for name, g in zip(expected, gradients, strict=True)}
    assert_equal(found, expected)


def test_tbptt_is_its_definition():
    model, (x, y, reset) = stack_of("gru"), tokens()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    state = None
    for start in range(0, T, 8):
        part = slice(start, start + 8)
        logits, state = model(x[:, part], state, reset=reset[:, part])
        loss = functional.cross_entropy(logits.flatten(0, 1), y[:, part].flatten(), reduction="sum")
        found = torch.autograd.grad(loss, [*model.parameters()])
        expected = {name: expected[name] + g for name, g in zip(expected, found, strict=True)}
        state = tuple(part.detach() for part in state)
    assert_equal(learnt(build_learner("tbptt", model, window=8), x, y, reset, 16), expected)


@pytest.mark.parametrize("mode", ["full", "full_rec", "1truncated", "spatial", "reservoir"])
@pytest.mark.parametrize("pieces", tiered([8], [0]))
def test_modes_of_online_lru_are_their_definition(mode, pieces):
    model, (x, y, reset) = stack_of("lru", channel_mixing="none"), tokens(rows=1)
    found = learnt(build_learner("online_lru", model, mode=mode), x, y, reset, pieces)
    # the definition, step by step: h_t = stop(lambda h_{t-1}) + gamma B x_t, errors of the same step
    of = [block.mixer for block in model.blocks]
    state = [torch.zeros(4, dtype=torch.complex128) for _ in of]
    traces = [dict.fromkeys(("lambda", "gamma", "B"), 0) for _ in of]
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for t in range(T):
        hidden, fresh = [], bool(reset[0, t])
        value = model.embedding(x[0, t : t + 1])[0]
        for layer, (block, mixer) in enumerate(zip(model.blocks, of, strict=True)):
            u = block.mixer_norm(value)
            lam = torch.exp(-mixer.nu_log.exp() + 1j * mixer.theta_log.exp())
            gamma = mixer.gamma_log.exp()
            B = torch.complex(mixer.B[::2], mixer.B[1::2])
            before = torch.zeros_like(state[layer]) if fresh else state[layer]
            h = (lam * before).detach() + gamma * (B @ u.to(B.dtype))
            h.retain_grad()
            hidden.append((h, before, u.detach(), lam.detach(), gamma.detach(), B.detach()))
            C = torch.complex(mixer.C[:, ::2], -mixer.C[:, 1::2])
            value = value + (C @ h).real + mixer.D * u
            state[layer] = h.detach()
        loss = functional.cross_entropy(model.head(model.norm(value))[None], y[0, t : t + 1])
        deltas = torch.autograd.grad(loss, [h for h, *_ in hidden], retain_graph=True)
        plain = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        for name, g in zip(expected, plain, strict=True):
            expected[name] += 0 if g is None else g
        for layer, (delta, (_, before, u, lam, gamma, B)) in enumerate(zip(deltas, hidden, strict=True)):
            kept, mixer, path = 0 if fresh else 1, of[layer], f"blocks.{layer}.mixer."
            step = {"lambda": before, "gamma": B @ u.to(B.dtype), "B": torch.outer(gamma, u)}
            decay = {"lambda": lam, "gamma": lam, "B": lam[:, None]}
            if mode == "1truncated":
                trace = step
            else:
                trace = traces[layer] = {p: kept * decay[p] * traces[layer][p] + step[p] for p in step}
            # cotangents of torch are conjugated
            by_lam, by_gamma = delta * trace["lambda"].conj(), (delta * trace["gamma"].conj()).real
            by_B = delta[:, None] * trace["B"].conj()
            nu, theta = mixer.nu_log.detach().exp(), mixer.theta_log.detach().exp()
            if mode in ("full", "full_rec", "1truncated"):
                expected[path + "nu_log"] += (by_lam.conj() * -nu * lam).real
                expected[path + "theta_log"] += (by_lam.conj() * 1j * theta * lam).real
            if mode in ("full", "full_rec"):
                # in place of the gradient of the same step
                same = (delta * step["gamma"].conj()).real
                expected[path + "gamma_log"] += (by_gamma - same) * gamma
            if mode == "full":
                same = delta[:, None] * step["B"].conj()
                expected[path + "B"] += torch.view_as_real(by_B - same).transpose(1, 2).flatten(0, 1)
    if mode == "reservoir":
        for layer in range(2):
            expected |= {
                f"blocks.{layer}.mixer.{name}": torch.zeros_like(found[f"blocks.{layer}.mixer.{name}"])
                for name in ("B", "gamma_log")
            }
    assert_equal(found, expected)


def test_focused_backpropagation_is_the_trace_of_self_loops():
    mixer, (x, y, _) = mixer_of("ind_rnn", activation="tanh"), stream(rows=1, resets=False)
    learner = build_learner("focused_backpropagation", mixer)
    W, b, w = mixer.W.weight.detach(), mixer.W.bias.detach(), mixer.u.detach()
    h, e_w, e_W = torch.zeros(4, dtype=torch.float64), torch.zeros(4), torch.zeros(4, 4)
    by_w, by_W = torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for t in range(T):
        a = W @ x[0, t] + w * h + b
        D = 1 - torch.tanh(a) ** 2
        e_w, e_W = D * (h + w * e_w), D[:, None] * (x[0, t] + w[:, None] * e_W)
        h = torch.tanh(a)
        error = (h - y[0, t]) / 2
        by_w, by_W = by_w + error * e_w, by_W + error[:, None] * e_W
        learner.step(x[:, t], y[:, t])
        assert_equal(learner.memory["traces"][""], {"u": e_w[None], "W.weight": e_W[None]})
    assert_equal(learner.gradients(), {"u": by_w, "W.weight": by_W})


def test_the_rule_of_1997_is_the_trace_of_the_cell_alone():
    mixer, (x, y, _) = mixer_of("lstm"), stream(rows=1, steps=20, resets=False)
    learner = build_learner("lstm_1997", mixer)
    W, U, b, c = (p.detach() for p in mixer.rnn.parameters())
    h, s = torch.zeros(2, 4, dtype=torch.float64)
    trace, expected = torch.zeros(16, 4, dtype=torch.float64), torch.zeros(16, 4, dtype=torch.float64)
    for t in range(20):
        i, f, g, o = (W @ x[0, t] + b + U @ h + c).chunk(4)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        by_gate = torch.stack([g * i * (1 - i), s * f * (1 - f), i * (1 - g**2), torch.zeros(4)])
        # the trace of W's entry (gate, channel, input)
        immediate = by_gate[:, :, None] * x[0, t]
        trace = (f[None, :, None] * trace.unflatten(0, (4, 4)) + immediate).flatten(0, 1)
        s = f * s + i * g
        error = (o * torch.tanh(s) - y[0, t]) / 2
        through = (error * o * (1 - torch.tanh(s) ** 2))[None, :, None]
        expected += (through * trace.unflatten(0, (4, 4))).flatten(0, 1)
        expected[12:] += (error * torch.tanh(s) * o * (1 - o))[:, None] * x[0, t]
        h = o * torch.tanh(s)
        learner.step(x[:, t], y[:, t])
    assert_equal(learner.gradients(), {"rnn.weight_ih_l0": expected})


def of_row(learner, row):
    """Return a learner of one row, with the noise of that row of a learner of two."""
    memory = learner.first_memory(2, torch.device("cpu"))
    own = {name: tree for name, tree in memory.items() if name not in learner.shared}
    learner.memory = memory | map_tree(lambda tensor: tensor[row : row + 1], own)
    return learner


LEARNERS = [
    ("tbptt", "gru", {}),
    ("fptt", "gru", {"beta": 0.25}),
    ("rtrl", "lru", {}),
    ("rtrl", "hgru", {"credit": "spatial"}),
    ("dense_rtrl", "gru", {}),
    ("online_lru", "lru", {"mode": "full_rec"}),
    ("focused_backpropagation", "ind_rnn", {}),
    ("lstm_1997", "lstm", {}),
    ("frozen_rls", "gru", {}),
    ("uoro", "gru", {}),
    ("kf_rtrl", "elman", {}),
    ("snap", "gru", {"n": 2}),
    ("d_rtrl", "lstm", {}),
    ("rflo", "elman", {}),
    ("ostl", "gru", {}),
    ("e_prop", "gru", {"kappa": 0.5, "feedback": "random"}),
    ("pp_prop", "gru", {}),
    ("rbp", "gru", {"contraction": 0.1}),
    ("rbp_cg", "gru", {}),
    ("rbp_neumann", "gru", {}),
    ("hebb", "elman", {"kappa": 0.5, "modulated": True}),
    ("predictive_coding", "gru", {"sweeps": 9}),
    ("temporal_predictive_coding", "gru", {}),
]
each_learner = pytest.mark.parametrize("name, mixer, options", LEARNERS)


@each_learner
def test_rows_are_independent(name, mixer, options):
    model, (x, y, reset) = stack_of(mixer), tokens(steps=8)
    both = learnt(build_learner(name, model, **options), x, y, reset, 4)
    alone = [
        learnt(of_row(build_learner(name, model, **options), i), *(z[i : i + 1] for z in (x, y, reset)), 4)
        for i in (0, 1)
    ]
    assert_equal(both, {name: alone[0][name] + alone[1][name] for name in both})


@each_learner
def test_a_reset_row_is_that_of_a_new_learner(name, mixer, options):
    model, (x, y, reset) = stack_of(mixer), tokens(steps=8)
    used, new = (build_learner(name, model, **options) for _ in range(2))
    new = of_row(new, 1)
    learnt(used, y, x, reset, 4)
    untouched = [leaf[:1].clone() for leaf in leaves(used.memory)]
    used.reset(torch.tensor([False, True]))
    assert all(torch.equal(a, b[:1]) for a, b in zip(untouched, leaves(used.memory), strict=True))
    before = used.gradients()
    part = slice(1, 2)
    # rows apart, because gradients are of all rows
    weight = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, 4)
    for start in range(0, 8, 4):
        now = slice(start, start + 4)
        used.chunk(x[:, now], y[:, now], weight=weight)
        new.chunk(x[part, now], y[part, now])
    after = used.gradients()
    assert_equal({n: after[n] - before[n] for n in after}, new.gradients())


@each_learner
def test_a_state_continues_bit_for_bit(name, mixer, options, tmp_path):
    def made():
        model = stack_of(mixer)
        return build_learner(
            name, model, torch.optim.Adam(model.parameters(), lr=0.01), update_every=3, **options
        )

    x, y, reset = tokens(steps=12)
    whole = made()
    learnt(whole, x, y, reset, 4)
    first, second = made(), made()
    learnt(first, x[:, :8], y[:, :8], reset[:, :8], 4)
    torch.save(first.state_dict(), tmp_path / "state")
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    learnt(second, x[:, 8:], y[:, 8:], reset[:, 8:], 4)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole.memory), leaves(second.memory), strict=True))


@each_learner
def test_memory_does_not_grow(name, mixer, options):
    learner = build_learner(name, stack_of(mixer), **options)
    sizes = []
    for steps in (4, 12):
        learnt(learner, *tokens(steps=steps), 4)
        sizes.append(
            sum(leaf.numel() * leaf.element_size() for leaf in leaves(learner.state_dict()["memory"]))
        )
        assert not any(leaf.requires_grad or leaf.grad_fn for leaf in leaves(learner.memory))
    assert sizes[0] == sizes[1]


@each_learner
def test_what_is_not_finite_is_refused_and_changes_nothing(name, mixer, options):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 4).double(), mixer_of(mixer)
    learner = build_learner(name, model[1], torch.optim.SGD(model[1].parameters(), lr=0.1), **options)
    x, y, _ = stream(steps=12)
    learner.chunk(x[:, :8], y[:, :8])
    before = copy.deepcopy(learner.state_dict())
    for inputs, targets in (
        (x, y.index_fill(1, torch.tensor(9), torch.nan)),
        (x.index_fill(1, torch.tensor(9), torch.inf), y),
    ):
        with pytest.raises(ValueError, match="step 9"):
            learner.chunk(inputs[:, 8:], targets[:, 8:])
        after = learner.state_dict()
        assert all(torch.equal(a, b) for a, b in zip(leaves(before), leaves(after), strict=True))
    # a step without a target may hold anything there, and its trace advances
    weight = torch.ones(2, 4, dtype=torch.float64).index_fill(1, torch.tensor(1), 0)
    learner.chunk(x[:, 8:], y.index_fill(1, torch.tensor(9), torch.nan)[:, 8:], weight=weight)
    assert all(leaf.isfinite().all() for leaf in leaves(learner.memory))


def test_a_step_without_a_target_passes_on_its_trace():
    mixer, (x, y, reset) = mixer_of("lru"), stream()
    weight = (torch.arange(T) % 5 == 0).double().expand(2, T)
    whole, online = build_learner("bptt", mixer), build_learner("rtrl", mixer)
    whole.chunk(x, y, reset, weight)
    for t in range(T):
        online.step(x[:, t], y[:, t], reset[:, t], weight[:, t])
    assert_equal(online.gradients(), whole.gradients())


def test_an_update_is_a_step_of_the_optimiser_on_the_mean_gradient():
    mixer, (x, y, _) = mixer_of("gru"), stream(steps=8)
    twin = copy.deepcopy(mixer)
    learner = build_learner("tbptt", mixer, torch.optim.SGD(mixer.parameters(), lr=0.5))
    assert learner.chunk(x, y).updated
    (twin(x)[0] - y).square().mean().backward()
    for p, q in zip(mixer.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q - 0.5 * q.grad, rtol=1e-12)
    assert not any(g.any() for g in learner.gradients().values())


def test_updates_come_every_n_steps_whatever_the_chunks():
    def parameters(pieces):
        mixer = mixer_of("lru")
        learner = build_learner("rtrl", mixer, torch.optim.SGD(mixer.parameters(), lr=0.01), update_every=4)
        learnt(learner, *stream(), pieces)
        return torch.cat([p.flatten() for p in mixer.parameters()])

    assert torch.allclose(parameters(0), parameters(8), rtol=1e-10)


def test_loss_after_an_update_is_of_the_new_parameters():
    mixer, (x, y, _) = mixer_of("lru"), stream(steps=4)
    learner = build_learner("tbptt", mixer, torch.optim.SGD(mixer.parameters(), lr=0.1), update_every=2)
    first = learner.chunk(x, y).loss
    assert torch.allclose(first[:, :2], (mixer_of("lru")(x)[0] - y).square().mean(-1)[:, :2])


def test_a_gradient_that_is_not_finite_leaves_the_parameters():
    mixer, (x, y, _) = mixer_of("lru"), stream(steps=4)
    learner = build_learner(
        "tbptt",
        mixer,
        torch.optim.SGD(mixer.parameters(), lr=0.1),
        loss=lambda p, t: (p - p.detach()).abs().sqrt().sum(2),
    )
    before = [p.clone() for p in mixer.parameters()]
    with pytest.raises(DivergedError, match="step 4"):
        learner.chunk(x, y)
    assert all(p.grad is None for p in mixer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, mixer.parameters(), strict=True))


def test_a_classifier_of_each_step_streams():
    config = SequenceClassifierConfig(
        n_outputs=3, n_features=2, mixer="lru", d_model=4, n_layers=1, bidirectional=False, pooling="none"
    )
    model = SequenceClassifier(config).double()
    x, reset = torch.randn(2, 12, 2, dtype=torch.float64), torch.zeros(2, 12, dtype=torch.bool)
    y = torch.randint(3, (2, 12))
    first, state = model.stream(x[:, :5], None)
    second, _ = model.stream(x[:, 5:], state)
    assert torch.allclose(torch.cat([first, second], 1), model(x))
    assert build_learner("rtrl", model).chunk(x, y, reset).prediction.shape == (2, 12, 3)
    whole = learnt(build_learner("bptt", model), x, y, reset, 12)
    assert_equal(learnt(build_learner("dense_rtrl", model), x, y, reset, 12), whole)


def test_a_classifier_of_the_last_step_streams_its_outputs_so_far():
    config = SequenceClassifierConfig(
        n_outputs=3, n_features=2, mixer="lru", d_model=4, n_layers=1, bidirectional=False, pooling="last"
    )
    model = SequenceClassifier(config).double()
    x = torch.randn(2, 9, 2, dtype=torch.float64)
    outputs, _ = model.stream(x)
    for t in (3, 9):
        assert torch.allclose(outputs[:, t - 1], model(x[:, :t]))
    assert build_learner("rtrl", model).chunk(x, torch.randint(3, (2, 9))).prediction.shape == (2, 9, 3)


@pytest.mark.parametrize("name, pieces", [("bptt", 24), ("tbptt", 24), ("dense_rtrl", 24)])
def test_the_loss_of_a_layer_counts_once_per_update(name, pieces):
    # of whatever pieces the chunk consists, and whatever their weights
    mixer, (x, y, _) = mixer_of("nn_rnn", delta=0.7), stream(steps=24, resets=False)
    with torch.no_grad():
        mixer.alpha.mul_(1.2)
    (mixer(x)[0] - y).square().mean().backward()
    expected = {name: p.grad for name, p in mixer.named_parameters()}
    learner = build_learner(name, mixer)
    found = learnt(learner, x, y, torch.zeros(2, 24, dtype=torch.bool), pieces)
    assert_equal({name: g / 48 for name, g in found.items()}, expected)


def test_several_optimisers_share_the_parameters():
    mixer, (x, y, _) = mixer_of("gru"), stream(steps=8)
    twin = copy.deepcopy(mixer)
    first, *rest = mixer.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.5), torch.optim.SGD(rest, lr=0.25)]
    learner = build_learner("tbptt", mixer, optimizers)
    learner.chunk(x, y, update=False)
    norm = learner.update()
    (twin(x)[0] - y).square().mean().backward()
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()]).item())
    for p, q, lr in zip(mixer.parameters(), twin.parameters(), [0.5, *[0.25] * len(rest)], strict=True):
        assert torch.allclose(p, q - lr * q.grad, rtol=1e-12)
    # nothing to learn from
    assert learner.update() is None


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: build_learner("rtlr", mixer_of("lru")), "rtrl"),
        (lambda: build_learner("rtrl", mixer_of("gru")), "dense_rtrl"),
        (lambda: build_learner("rtrl", stack_of("relit")), "blocks.0.mixer"),
        (lambda: build_learner("tbptt", stack_of("attention")), "blocks.0.mixer"),
        (
            lambda: build_learner(
                "tbptt", SequenceClassifier(SequenceClassifierConfig(n_outputs=2, n_features=1))
            ),
            "bidirectional",
        ),
        (
            lambda: build_learner(
                "tbptt",
                SequenceClassifier(
                    SequenceClassifierConfig(n_outputs=2, n_features=1, bidirectional=False, pooling="mean")
                ),
            ),
            "`pooling` = 'mean'",
        ),
        (
            lambda: build_learner("rtrl", mixer_of("lru"), credits="chunk"),
            "'rtrl' called 'credits'.*'credit'",
        ),
        (lambda: build_learner("dense_rtrl", mixer_of("gru", 65)), "65"),
        (lambda: build_learner("rtrl", mixer_of("lru").bfloat16()), "bfloat16"),
        (lambda: build_learner("dense_rtrl", mixer_of("exp_rnn", base="start", rebase_every=2)), "every 2"),
        (lambda: build_learner("online_lru", mixer_of("gru")), "lru"),
        (lambda: build_learner("lstm_1997", mixer_of("gru")), "lstm"),
        (lambda: build_learner("bptt", mixer_of("gru")).step(torch.ones(1, 4), torch.ones(1, 4)), "chunk"),
        (
            lambda: build_learner("tbptt", mixer_of("gru"), window=4).step(
                torch.ones(1, 4), torch.ones(1, 4)
            ),
            "4 steps",
        ),
        (
            lambda: build_learner("rtrl", mixer_of("lru")).chunk(torch.ones(1, 0, 4), torch.ones(1, 0, 4)),
            "step",
        ),
        (lambda: build_learner("rtrl", mixer_of("lru")).update(), "optimizer"),
    ],
)
def test_bad_input_gets_one_line_that_names_the_cure(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"targets": torch.ones(2, 3, 4)}, ValueError, r"`targets`.*\(2, 4\)"),
        ({"reset": torch.zeros(2, 3, dtype=torch.bool)}, ValueError, r"`reset`.*\(2, 4\)"),
        ({"reset": torch.zeros(2, 4)}, TypeError, "`reset`.*float32"),
        ({"weight": torch.ones(2, 4, dtype=torch.int64)}, TypeError, "`weight`.*int64"),
        ({"inputs": torch.ones(3, 4, 4), "targets": torch.ones(3, 4, 4)}, ValueError, "2 rows.*3"),
    ],
)
def test_arguments_of_the_wrong_form_are_refused(arguments, error, words):
    learner = build_learner("rtrl", mixer_of("lru").float())
    good = {"inputs": torch.ones(2, 4, 4), "targets": torch.ones(2, 4, 4)}
    learner.chunk(**good)
    with pytest.raises(error, match=words):
        learner.chunk(**good | arguments)


def test_checkpoints_of_others_are_refused():
    state = build_learner("rtrl", mixer_of("lru")).state_dict()
    for other in (
        build_learner("tbptt", mixer_of("lru")),
        build_learner("rtrl", mixer_of("lru"), credit="spatial"),
        build_learner("rtrl", mixer_of("lru", d_state=3)),
    ):
        with pytest.raises(CheckpointError):
            other.load_state_dict(state)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_runs_once_with_its_hooks_and_its_own_forward(rows):
    mixer, seen = mixer_of("lru"), []
    run = mixer.forward

    def forward(x, state=None, **options):
        seen.append("forward")
        return run(x, state, **options)

    mixer.forward = forward
    mixer.register_forward_pre_hook(lambda mixer, arguments: seen.append(tuple(arguments[0].shape)))
    learner = build_learner("rtrl", mixer)
    seen.clear()
    learner.chunk(*torch.randn(2, rows, 5, 4, dtype=torch.float64))
    assert seen == [(rows, 5, 4), "forward"]
    assert mixer.forward is forward


def test_parameters_without_a_trace_are_printed():
    learner = build_learner("rtrl", mixer_of("hawk"), partial=True)
    assert "u.weight" in str(learner) and "Lambda" not in str(learner)
    assert "traces of 66 numbers per row" in str(build_learner("rtrl", mixer_of("lru", d_state=3)))


@thorough
def test_the_page_lists_the_mixers_that_learn_online():
    text = (ROOT / "docs/which-mixer.md").read_text().split("**Learning online.**")[1].split("\n- **")[0]
    listed = [set(re.findall(r"`(\w+)`", part)) & {*mixers.names()} for part in text.split("For ")]
    exact, partial = set(), set()
    for name in mixers.names():
        try:
            (layer,) = learning.build_learner("rtrl", mixers.build(name, 8)).layers
        except ValueError as error:
            assert "\n" not in str(error) and "`model`" in str(error), name
            continue
        (partial if layer.untraced else exact).add(name)
    assert listed == [exact, partial]


def test_every_learner_is_listed():
    own = {name for name in learning.names() if learning.get(name).network is not None}
    # the memory of `lifted` belongs to its sequences
    listed = {name for name, *_ in LEARNERS} | {"bptt", "lifted"} | own
    assert listed == {*learning.names()}, "add the learner to `LEARNERS`"
