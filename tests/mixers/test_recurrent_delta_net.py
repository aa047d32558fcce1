import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.recurrent_delta_net import RecurrentDeltaNet
from linrec.testing import assert_agree, generator

from .fast_weights import TIME, D, inputs, resets

RNN = {"variant": "delta_rnn"}
VARIANTS = {
    "paper": {},
    "widths": {"n_heads": 2, "d_qk": 8, "d_v": 4},
    "elu": {"n_heads": 3, "feature_map": "elu"},
    "more features": {"n_heads": 2, "feature_map": "dpfp"},
    "output recurrence": {"n_heads": 2, "output_recurrence": True},
    "Delta RNN": RNN | {"n_heads": 2},
    "Delta RNN, version 1": {"variant": "delta_rnn_v1", "n_heads": 2},
    "Delta RNN, widths": RNN | {"n_heads": 2, "d_qk": 8, "d_v": 4, "feature_map": "elu"},
}


def make(d_model: int = D, **arguments) -> RecurrentDeltaNet:
    torch.manual_seed(0)
    mixer = build("recurrent_delta_net", d_model, **arguments)
    assert isinstance(mixer, RecurrentDeltaNet)
    return mixer


def phi(name, x):
    if name == "softmax":
        return x.exp() / x.exp().sum()
    if name == "elu":
        x = torch.where(x > 0, x + 1, x.exp())
    else:
        r = torch.cat([x, -x]).clamp(min=0)
        x = r * r.roll(-1)
    return x / x.sum().clamp(min=1e-6)


def equations(mixer, x, reset, *, feature_map="softmax", output_recurrence=False, variant="", **_):
    """Outputs, and the last W, y and R of each sequence and head, one number after the other."""
    h, dk, dv = mixer.n_heads, mixer.q.weight.shape[0] // mixer.n_heads, mixer.d_value
    outputs, states = torch.zeros(*x.shape[:2], h * dv, dtype=x.dtype), []
    rows = lambda module, i, width: module.weight[i * width : (i + 1) * width]  # noqa: E731
    features = len(phi(feature_map, torch.ones(dk)))
    for b in range(len(x)):
        for i in range(h):
            zero = torch.zeros(dv, features, dtype=x.dtype), torch.zeros(dv, dv, dtype=x.dtype)
            for t in range(x.shape[1]):
                if t == 0 or reset[b, t]:
                    (W, R), y = zero, torch.zeros(dv, dtype=x.dtype)
                q, k = rows(mixer.q, i, dk) @ x[b, t], rows(mixer.k, i, dk) @ x[b, t]
                v, beta = rows(mixer.v, i, dv) @ x[b, t], rows(mixer.beta, i, 1) @ x[b, t]
                added = torch.zeros(dv, dtype=x.dtype)
                if mixer.is_rnn:
                    k_r, v_r, beta_r = (
                        rows(module, i, width) @ x[b, t]
                        for module, width in (
                            (mixer.recurrent_k, dv),
                            (mixer.recurrent_v, dv),
                            (mixer.recurrent_beta, 1),
                        )
                    )
                    k_r = phi("softmax", k_r)
                    R = R + torch.outer(torch.sigmoid(beta_r) * (v_r - R @ k_r), k_r)
                    added = R @ (y if variant == "delta_rnn_v1" else phi("softmax", y))
                else:
                    R_q, R_k, R_v, r_beta, *R_y = mixer.R[i].T.split(
                        [dk, dk, dv, 1] + [dv] * output_recurrence
                    )
                    last = torch.tanh(y)
                    q, k, v, beta = q + R_q @ last, k + R_k @ last, v + R_v @ last, beta + r_beta @ last
                    if output_recurrence:
                        added = R_y[0] @ last
                q, k = phi(feature_map, q), phi(feature_map, k)
                W = W + torch.outer(torch.sigmoid(beta) * (v - W @ k), k)
                y = W @ q + added
                if variant == "delta_rnn_v1":
                    y = phi("softmax", y)
                outputs[b, t, i * dv : (i + 1) * dv] = y
            states.append((W.T, y, R.T))
    W, y, R = (torch.stack(part).unflatten(0, (len(x), h)) for part in zip(*states, strict=True))
    return outputs @ mixer.out.weight.T, W, y, R


@pytest.mark.parametrize("reset", [torch.zeros(2, TIME, dtype=torch.bool), resets()], ids=["one", "several"])
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_gradients_and_state_are_those_of_the_equations(name, reset):
    mixer = make(**VARIANTS[name]).double()
    x = inputs().requires_grad_()
    expected, *last = equations(mixer, x, reset, **VARIANTS[name])
    y, state = mixer(x, reset=reset)
    assert_agree(y, expected)
    assert (state.R is None) == (not mixer.is_rnn)
    assert_agree(state, last[: 2 + mixer.is_rnn])
    wanted = [x, *mixer.parameters()]
    cotangent = torch.randn(y.shape, generator=generator(1), dtype=torch.float64)
    assert_agree(torch.autograd.grad(y, wanted, cotangent), torch.autograd.grad(expected, wanted, cotangent))


def test_the_last_output_changes_what_is_written():
    mixer, x = make().double(), inputs()
    _, state = mixer(x[:, :4])
    _, moved = mixer(x[:, 4:5], state._replace(y=state.y + 1))
    _, kept = mixer(x[:, 4:5], state)
    assert (moved.W - kept.W).abs().max() > 1e-3
    # the weights that Delta RNN writes do not depend on it, and its output does
    rnn = make(**RNN).double()
    _, state = rnn(x[:, :4])
    after, moved = rnn(x[:, 4:5], state._replace(y=state.y + torch.arange(D)))
    before, kept = rnn(x[:, 4:5], state)
    assert_agree((moved.W, moved.R), (kept.W, kept.R))
    assert (after - before).abs().max() > 1e-3


def test_parameters_are_those_of_the_papers_code():
    d = 128
    h, dv = 8, 16
    projections = 4 * d * d + d * h
    for arguments, expected in [
        ({}, projections + h * dv * (3 * dv + 1)),
        ({"output_recurrence": True}, projections + h * dv * (4 * dv + 1)),
        (RNN, projections + 2 * d * d + d * h),
    ]:
        mixer = make(d, **arguments)
        assert sum(p.numel() for p in mixer.parameters()) == expected
        for name, parameter in mixer.named_parameters():
            std = 1 / math.sqrt(dv) if name == "R" else 1 / math.sqrt(3 * d)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name


def test_state_size_counts_fast_weights_and_the_last_output():
    assert make(n_heads=2).state_size == 2 * (3 * 3 + 3)
    assert make(n_heads=2, **RNN).state_size == 2 * (3 * 3 + 3 + 3 * 3)
    assert make(n_heads=2, feature_map="dpfp").state_size == 2 * (6 * 3 + 3)
    assert [make(width).n_heads for width in (6, 32, 128)] == [1, 2, 8]
    assert make(64, d_qk=64, d_v=48).n_heads == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_qk` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"n_heads": 2, "d_v": 5}, "`d_v` must be a positive multiple of `n_heads` = 2; got 5"),
        ({"variant": "delta_rn"}, "there is no `variant` 'delta_rn'; did you mean 'delta_rnn'"),
        (RNN | {"output_recurrence": True}, "Delta RNN has R_t in its place"),
        ({"feature_map": "cosformer"}, "`feature_map` of the delta rule must have no phase"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
