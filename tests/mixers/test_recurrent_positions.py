import pytest
import torch

from linrec.mixers.attention import Attention
from linrec.mixers.recurrent_positions import RecurrentPositions
from linrec.testing import assert_agree, generator

TIME, D = 7, 8


def make(**arguments):
    torch.manual_seed(0)
    return RecurrentPositions(D, **({"d_recurrent": 2} | arguments)).double()


def inputs():
    return torch.randn(1, TIME, D, generator=generator(), dtype=torch.float64)


def recurrent(mixer, x):
    """Return r, step by step, in the paper's equation."""
    W, U, b, c = mixer.rnn.rnn.parameters()
    r, steps = x.new_zeros(1, 2), []
    for s in x[:, :, -2:].unbind(1):
        r = torch.tanh(s @ W.T + b + r @ U.T + c)
        steps.append(r)
    return torch.stack(steps, 1)


def test_each_head_reads_words_beside_recurrent_positions():
    mixer, x = make(n_heads=2), inputs()
    assert mixer.attention.n_heads == 2
    r = recurrent(mixer, x)
    assert_agree(mixer(x)[0], mixer.attention(torch.cat([x[..., :6], r], -1))[0])


def test_independent_heads_read_one_of_them():
    mixer, x = make(heads="independent", n_heads=3, n_recurrent_heads=2), inputs()
    of_p, of_r = mixer.attention, mixer.attention_r
    assert (of_p.n_heads, of_r.n_heads, of_r.rotary) == (3, 2, None)
    expected = torch.cat([of_p(x[..., :6])[0], of_r(recurrent(mixer, x))[0]], -1)
    assert_agree(mixer(x)[0], expected)


def test_recurrent_positions_know_the_order_where_attention_does_not():
    mixer, x = make(positions="none"), inputs()
    shuffled = torch.cat([x[:, :6].flip(1), x[:, 6:]], 1)
    assert (mixer(shuffled)[0] - mixer(x)[0])[:, -1].abs().max() > 1e-3


def test_the_network_is_any_mixer():
    mixer, x = make(rnn="min_gru", rnn_args={"d_state": 5}), inputs()
    r, _ = mixer.rnn(x[..., 6:])
    assert_agree(mixer(x)[0], mixer.attention(torch.cat([x[..., :6], r], -1))[0])


def test_parameters_are_those_of_the_parts():
    count = sum(p.numel() for p in make(bias=True).parameters())
    attention = sum(p.numel() for p in Attention(D, bias=True).parameters())
    assert count == attention + 2 * 2**2 + 2 * 2
    # the heads of p and r have matrices of their own
    assert sum(p.numel() for p in make(heads="independent").parameters()) == 4 * (6**2 + 2**2) + 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_recurrent": 0}, "`d_recurrent` must be"),
        ({"d_recurrent": D}, "`d_recurrent` must be"),
        ({"heads": "own"}, "there is no `heads` 'own'"),
        ({"rnn": "elmans"}, "did you mean 'elman'"),
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
        ({"n_recurrent_heads": 0}, "`n_recurrent_heads`"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
