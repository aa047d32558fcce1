"""expRNN and dtriv."""

import dataclasses
import math

import pytest
import torch

from linrec.lab.train import fit, get_recipe, load_run
from linrec.mixers import build
from linrec.mixers.exp_rnn import ExpRNN
from linrec.nn import groups_of
from linrec.testing import generator
from tests.mixers.orthogonality import trained

D = 8


def make(d_model: int = D, **arguments) -> ExpRNN:
    torch.manual_seed(0)
    mixer = build("exp_rnn", d_model, **arguments)
    assert isinstance(mixer, ExpRNN)
    return mixer


@pytest.mark.parametrize("arguments", [{}, {"matrix_map": "cayley"}, {"init": "henaff", "base": "start"}])
def test_the_matrix_moves_and_stays_orthogonal_in_training(arguments):
    mixer = make(**arguments)
    before = mixer.B().detach()
    after = trained(mixer).B().detach()
    assert (after - before).abs().max() > 0.1
    assert (after @ after.T - torch.eye(D)).abs().max() < 1e-6


def test_without_input_the_norm_of_the_state_is_kept():
    mixer = make().double()
    torch.nn.init.zeros_(mixer.b)
    start = torch.randn(2, D, generator=generator(), dtype=torch.float64)
    y, _ = mixer(torch.zeros(2, 500, D, dtype=torch.float64), start)
    torch.testing.assert_close(y.norm(dim=-1), start.norm(dim=-1)[:, None].expand(2, 500))


def test_initial_values_and_groups():
    mixer = make(200)
    assert mixer.V.weight.std().item() == pytest.approx(math.sqrt(2 / 200), rel=0.02)
    assert 0.0095 < mixer.b.abs().max() <= 0.01 and mixer.b.mean().abs() < 0.002
    assert sum(parameter.numel() for parameter in mixer.parameters()) == 200**2 + 200 * 199 // 2 + 200
    groups = groups_of(mixer)
    assert {name for name, group in groups.items() if group.name == "transition"} == {"B.A"}
    assert not groups["B.A"].weight_decay


def test_moving_the_base_keeps_the_matrix_and_moves_its_meaning():
    fixed = make(init="henaff", base="start")
    moving = make(init="henaff", base="start", rebase_every=2)
    A = 0.3 * torch.randn(fixed.B.A.shape, generator=generator())
    for mixer in (fixed, moving):
        mixer.B.A.data.copy_(A)
    B = fixed.B().detach()
    for updates in (1, 2):
        moving.B.after_update(updates)
        torch.testing.assert_close(moving.B().detach(), B)
        assert bool(moving.B.A.any()) == (updates == 1)
    # the next A turns the moved base, so B_0 exp(S) exp(S) and not B_0 exp(2 S)
    upper = torch.zeros(D, D)
    upper[tuple(torch.triu_indices(D, D, 1))] = A
    moving.B.A.data.copy_(A)
    expected = fixed.B.base @ torch.matrix_exp(upper - upper.T) @ torch.matrix_exp(upper - upper.T)
    torch.testing.assert_close(moving.B().detach(), expected)


def test_training_moves_the_base(tmp_path):
    recipe = get_recipe("adding")
    small = {"length": 9, "n_train": 20, "n_validation": 8, "n_test": 8}
    args = {"init": "henaff", "base": "start", "rebase_every": 3}
    config = dataclasses.replace(
        recipe,
        task=dataclasses.replace(recipe.task, **small),
        model=dataclasses.replace(recipe.model, d_model=4, n_layers=1, mixer="exp_rnn", mixer_args=args),
        optim=dataclasses.replace(recipe.optim, warmup_steps=0, lr=0.05),
        loop=dataclasses.replace(recipe.loop, batch_size=4, compile="off", keep="last"),
    )
    weights = []
    for steps in (5, 6):
        loop = dataclasses.replace(config.loop, steps=steps)
        fit(dataclasses.replace(config, loop=loop), tmp_path / str(steps))
        weights.append(load_run(tmp_path / str(steps)).classifier().state_dict())
    after, moved = ({name.split("mixer.B.")[-1]: w for name, w in each.items()} for each in weights)
    assert after["A"].any() and not moved["A"].any()
    assert (moved["base"] - after["base"]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rebase_every": 2}, "`rebase_every` = 2 needs `base` = 'start'; got 'identity'"),
        ({"base": "start", "rebase_every": 0}, "`rebase_every` must be at least 1; got 0"),
    ],
)
def test_a_base_that_cannot_move_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
