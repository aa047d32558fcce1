"""A trainable initial state."""

import pytest
import torch

from linrec.models import InitialState, LanguageModel, ModelConfig
from linrec.testing import assert_agree, generator
from linrec.trees import leaves
from tests.mixers.variants import CAUSAL
from tests.tiers import tiered

SOME = ["gate_loop", "mamba", "mlstm"]
# their states are caches alone, which grow from nothing
GROW = ["attention", "gate_loop_attention", "gmlp", "reformer", "sgconv", "synthesizer", "tnn"]
each = pytest.mark.parametrize("name", tiered(SOME, [], [n for n in CAUSAL if n not in GROW]))


def make(name: str | tuple[str, ...]) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocab_size=7, d_model=16, n_layers=2, mixer=name)).double()


def tokens() -> torch.Tensor:
    return torch.randint(7, (3, 9), generator=generator())


@each
def test_the_start_changes_no_output(name: str) -> None:
    model = make(name).eval()
    start = InitialState(model).double()
    assert_agree(model(tokens(), start(model.init_state(3)))[0], model(tokens())[0])


@pytest.mark.parametrize("name", ["gate_loop", "delta_net", "mamba"])
def test_the_state_after_a_prompt_is_a_start(name: str) -> None:
    model = make(name)
    start = InitialState(model).double()
    _, prompted = model(tokens()[:1, :4])
    with torch.no_grad():
        for part, tensor in zip(start.parameters(), leaves(prompted), strict=True):
            part.copy_(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    whole = torch.cat([tokens()[:1, :4].expand(3, -1), tokens()], 1)
    assert_agree(model(tokens(), start(model.init_state(3)))[0], model(whole)[0][:, 4:])


@pytest.mark.parametrize("name", ["gate_loop", "mlstm", ("lru", "attention")])
def test_all_of_it_is_trained(name: str | tuple[str, ...]) -> None:
    model = make(name)
    start = InitialState(model).double()
    model(tokens(), start(model.init_state(3)))[0].square().mean().backward()
    grads = [parameter.grad for parameter in start.parameters()]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)


def test_it_stays_in_float32_and_is_stored() -> None:
    model = make("gate_loop")
    start = InitialState(model)
    torch.nn.init.normal_(next(start.parameters()))
    other = InitialState(model)
    other.load_state_dict(start.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), other.parameters(), strict=True))
    assert {parameter.dtype for parameter in start.bfloat16().parameters()} == {torch.float32}


@pytest.mark.parametrize("name", GROW)
def test_models_without_a_state_of_fixed_size_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must have a state of fixed size"):
        InitialState(make(name))
