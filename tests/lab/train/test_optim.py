import torch
from torch import nn

from linrec.lab.train import OptimConfig
from linrec.lab.train.optim import gradient_norm, make_optimizers, parameter_groups, set_learning_rate
from linrec.models import LanguageModel, preset
from linrec.nn.parameters import mark

CONFIG = OptimConfig(lr=0.1, transition_lr=0.02, weight_decay=0.3)


def test_every_parameter_of_gateloop_is_in_the_group_that_the_paper_says() -> None:
    model = LanguageModel(preset("memory-horizon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, CONFIG)
    assert sum(len(group["params"]) for group in groups) == len(names)
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            in_transition = ".transition." in name
            decays = not in_transition and parameter.ndim >= 2
            assert group["peak_lr"] == (0.02 if in_transition else 0.1), name
            assert group["weight_decay"] == (0.3 if decays else 0.0), name


def test_transition_learning_rate_defaults_to_the_other() -> None:
    model = mark(nn.Linear(2, 2))
    (group,) = parameter_groups(model, OptimConfig(lr=0.1))
    assert group["peak_lr"] == 0.1


def test_a_mark_may_ask_for_no_weight_decay_alone() -> None:
    model = mark(nn.Linear(2, 2, bias=False), group="default", weight_decay=False)
    (group,) = parameter_groups(model, CONFIG)
    assert group["peak_lr"] == 0.1 and group["weight_decay"] == 0.0


def test_each_group_moves_by_its_own_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), mark(nn.Linear(2, 2, bias=False)))
    (optimizer,) = make_optimizers(model, OptimConfig(lr=0.1, transition_lr=0.02, weight_decay=0.0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_learning_rate([optimizer], 0.5)
    optimizer.step()
    # AdamW's first step is the learning rate itself, whatever the gradient's size
    moved = [(b - p).detach() for b, p in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(moved[0], torch.full((2, 2), 0.05), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moved[1], torch.full((2, 2), 0.01), rtol=1e-5, atol=1e-6)


def test_muon_gets_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = LanguageModel(preset("memory-horizon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    config = OptimConfig(name="muon", lr=0.1, transition_lr=0.05, muon_lr=0.02)
    adamw, muon = make_optimizers(model, config)
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    suffixes = ("mixer.q", "mixer.k", "mixer.v", "channel_mixing.up", "channel_mixing.down")
    assert of_muon == {f"blocks.{i}.{suffix}.weight" for i in range(4) for suffix in suffixes}
    assert {group["peak_lr"] for group in muon.param_groups} == {0.02}
    assert {group["peak_lr"] for group in adamw.param_groups} == {0.05, 0.1}
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(names) - len(of_muon)


def test_weight_decay_is_decoupled() -> None:
    model = nn.Linear(2, 2, bias=False)
    (optimizer,) = make_optimizers(model, OptimConfig(lr=0.1, weight_decay=0.3))
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(model.weight)
    set_learning_rate([optimizer], 1.0)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.1 * 0.3))


def test_complex_parameters_are_trained_too() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    (optimizer,) = make_optimizers(model, OptimConfig(lr=0.1))
    model[0].grad = torch.ones_like(model[0])
    optimizer.step()
    torch.testing.assert_close(model[0].detach().real, torch.full((2,), 0.9))


def test_gradient_norm_is_that_of_all_gradients_as_one_vector() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    assert gradient_norm(parameters).item() == 7.0
