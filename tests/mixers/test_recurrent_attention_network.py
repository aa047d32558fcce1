import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers.recurrent_attention_network import RecurrentAttentionNetwork
from linrec.testing import assert_agree, generator

TIME, D, W = 15, 6, 4


def make(**arguments):
    torch.manual_seed(0)
    given = {"n_heads": 2, "d_head": 4, "segment_length": W, "n_cells": 8} | arguments
    mixer = RecurrentAttentionNetwork(D, **given).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def inputs():
    return torch.randn(1, TIME, D, generator=generator(), dtype=torch.float64)


def turn(x, n):
    """A head's vectors (h, d), turned by their position."""
    d = x.shape[-1]
    angle = torch.tensor([n * 10_000 ** (-2 * j / d) for j in range(d // 2)], dtype=torch.float64)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def act(mixer, x):
    return functional.silu(x) if mixer.silu else x


def standardise(x):
    return (x - x.mean()) / (x.var(correction=0) + 1e-7).sqrt()


def hidden(mixer, X, n):
    """Row n of H, which sees the rows of X that are passed."""
    project = [act(mixer, f(X)).unflatten(-1, (mixer.n_heads, -1)) for f in (mixer.q, mixer.k, mixer.v)]
    q, k, v = turn(project[0][n], n), [turn(key, m) for m, key in enumerate(project[1])], project[2]
    scores = torch.stack([(q * key).sum(-1) / math.sqrt(mixer.d_head) for key in k])
    heads = (scores.softmax(0)[..., None] * v).sum(0).flatten()
    return mixer.h_norm(act(mixer, mixer.out(heads)) + functional.glu(mixer.h_glu(X[n]), -1))


def by_windows(mixer, x, first=W):
    """One row, step by step and window by window, of which the first has `first` steps."""
    cells, outputs = [], []
    for window in (x[:first], *x[first:].split(W)):
        g = mixer.g_1
        if len(cells) == 1:
            g = cells[0]
        elif cells:
            g = mixer.g_norm(cells[-1] + functional.glu(mixer.g_glu(cells[-2]), -1))
        X = mixer.x_norm(torch.cat([g[None], window]))
        for t in range(1, len(X)):
            q = act(mixer, mixer.q_c(standardise(hidden(mixer, X[: t + 1], t))))
            found = torch.zeros(D, dtype=torch.float64)
            if reviewed := cells[-mixer.n_cells :]:
                k, v = (act(mixer, f(torch.stack(reviewed))) for f in (mixer.k_c, mixer.v_c))
                found = (k @ q / math.sqrt(D)).softmax(0) @ v
            outputs.append(mixer.o_norm(act(mixer, mixer.out_c(found)) + functional.glu(mixer.o_glu(q), -1)))
        if len(window) == (W if cells else first):
            cells.append(standardise(hidden(mixer, X, 0)))
    return torch.stack(outputs), cells


@pytest.mark.parametrize("arguments", [{}, {"silu": False}, {"n_cells": 2}])
def test_outputs_are_those_of_one_step_after_the_other(arguments):
    mixer, x = make(**arguments), inputs()
    y, state = mixer(x)
    expected, cells = by_windows(mixer, x[0])
    assert_agree(y[0], expected)
    kept = cells[-mixer.n_cells :]
    assert_agree(state.memory.h[0, -len(kept) :], torch.stack(kept))


@pytest.mark.parametrize("begin", [W, W + 1, 2 * W - 1])
def test_a_sequence_starts_at_a_reset_beside_the_first_cell(begin):
    mixer, x = make(), inputs()
    reset = torch.zeros(1, TIME, dtype=torch.bool)
    reset[0, begin] = True
    y, state = mixer(x, reset=reset)
    expected, cells = by_windows(mixer, x[0, begin:], first=2 * W - begin)
    assert_agree(y[0, begin:], expected)
    assert state.memory.alive.sum() == len(cells) == 2
    assert_agree(state.memory.h[0, -2:], torch.stack(cells))


def test_gradients_reach_the_first_window_through_cells_alone():
    mixer, x = make(detach="segment"), inputs().requires_grad_()
    mixer(x)[0][:, -1].sum().backward()
    assert not x.grad[:, : 3 * W].any() and x.grad[:, 3 * W :].any()
    mixer, x = make(), inputs().requires_grad_()
    mixer(x)[0][:, -1].sum().backward()
    assert (x.grad.abs().amax(-1) > 0).all()


def test_parameter_count():
    width = 2 * 4
    # MHA, memory review, three GLUs, four norms and g_1
    count = 3 * (D + 1) * width + (width + 1) * D + 4 * (D + 1) * D + 3 * (D + 1) * 2 * D + 4 * 2 * D + D
    assert sum(parameter.numel() for parameter in make().parameters()) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"n_cells": 1}, "`n_cells`"), ({"d_head": 3}, "`d_head`"), ({"norm_eps": -1.0}, "`norm_eps`")],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
