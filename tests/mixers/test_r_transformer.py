import pytest
import torch

from linrec.mixers import build
from linrec.mixers.attention import Attention
from linrec.mixers.r_transformer import RTransformer
from linrec.models.block import Block
from linrec.testing import assert_agree, generator

TIME, D = 7, 6


def make(**arguments):
    torch.manual_seed(0)
    mixer = RTransformer(D, **({"window": 3, "n_heads": 2} | arguments)).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def inputs():
    return torch.randn(1, TIME, D, generator=generator(), dtype=torch.float64)


def locally(mixer, x):
    """u, whose networks run over one window after the other."""
    for rnn, norm in zip(mixer.rnns, mixer.rnn_norms, strict=True):
        padded = torch.cat([x.new_zeros(len(x), mixer.window - 1, D), norm(x)], 1)
        steps = [rnn(padded[:, n : n + mixer.window])[0][:, -1] for n in range(x.shape[1])]
        x = x + torch.stack(steps, 1)
    return x


@pytest.mark.parametrize("arguments", [{}, {"n_rnns": 2, "rnn": "lstm"}, {"window": 1, "rnn": "elman"}])
def test_outputs_are_those_of_one_window_after_the_other(arguments):
    mixer, x = make(**arguments), inputs()
    u = locally(mixer, x)
    assert_agree(x + mixer(x)[0], u + mixer.attention(mixer.attention_norm(u))[0])


def test_a_window_does_not_reach_over_a_reset():
    mixer, x = make(), inputs()
    reset = torch.zeros(1, TIME, dtype=torch.bool)
    reset[0, 4] = True
    y, state = mixer(x, reset=reset)
    expected, last = mixer(x[:, 4:])
    assert_agree(y[:, 4:], expected)
    assert_agree(state.steps, last.steps)


def test_without_local_memory_a_window_of_one_step_is_attention_after_a_layer():
    # the output of a GRU after one step from zero depends on that step alone
    mixer, x = make(window=1), inputs()
    changed = x.clone()
    changed[:, 0] += 1
    u, other = locally(mixer, x), locally(mixer, changed)
    assert_agree(u[:, 1:], other[:, 1:])


def test_a_block_adds_the_input_and_has_no_norm_of_its_own():
    mixer, x = make(), inputs()
    block = Block(mixer, None).double()
    assert not [*block.mixer_norm.parameters()]
    assert_agree(block(x)[0], x + mixer(x)[0])


def test_parameters_are_those_of_the_parts():
    parts = [build("gru", D), build("gru", D), Attention(D, n_heads=2, positions="none", bias=True)]
    count = sum(parameter.numel() for part in parts for parameter in part.parameters())
    # the norms of three sublayers
    assert sum(p.numel() for p in make(n_rnns=2).parameters()) == count + 3 * 2 * D


def test_local_networks_are_any_mixer():
    mixer, x = make(rnn="min_gru", rnn_args={"d_state": 9}), inputs()
    u = locally(mixer, x)
    assert_agree(x + mixer(x)[0], u + mixer.attention(mixer.attention_norm(u))[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "`window`"),
        ({"n_rnns": 0}, "`n_rnns`"),
        ({"rnn": "grus"}, "did you mean 'gru'"),
        ({"n_heads": 4}, "`d_model`"),
        ({"norm": "batch"}, "norm"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_channel_of_a_local_network_is_dropped_once():
    mixer, x = make(dropout=0.5), torch.randn(4, 50, D, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        # without the output of the attention
        mixer.attention.out.weight.zero_()
        mixer.attention.out.bias.zero_()
        local = locally(mixer, x) - x
        block = Block(mixer, None, dropout=0.5).double().train()
        shares = (block(x)[0] - x) / local
    assert_agree(shares.unique(sorted=True).round(decimals=6).unique(), torch.tensor([0.0, 2.0]).double())
    assert 0.4 < (shares == 0).double().mean() < 0.6
    assert Block(make(), None, dropout=0.5).mixer.own_dropout is False
