"""Constants and shared parameters of modules that were built on "meta"."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from linrec import mixers
from linrec.hippo import OnlineApproximation
from linrec.models import Bidirectional, LanguageModel, ModelConfig
from linrec.restored import RestoredModule


def language_model(mixer: str = "gru") -> LanguageModel:
    return LanguageModel(ModelConfig(vocab_size=7, d_model=4, n_layers=1, mixer=mixer, tie_embeddings=True))


def emptied(module: nn.Module, state: dict[str, Tensor]) -> None:
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(7)
    module.load_state_dict(state)


def assigned(module: nn.Module, state: dict[str, Tensor]) -> None:
    module.load_state_dict(state, assign=True)


from_meta = pytest.mark.parametrize("fill", [emptied, assigned])
TOKENS = torch.tensor([[1, 2, 3]])
SIGNAL = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))


@from_meta
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (language_model, TOKENS),
        # with constants in a part of the model
        (lambda: language_model("lmu"), TOKENS),
        (lambda: Bidirectional(*(mixers.build("hgru", 4) for _ in "ab"), unshared=("theta",)), SIGNAL),
        (lambda: OnlineApproximation("legs", 4), SIGNAL),
        (lambda: OnlineApproximation("legt", 4, window=3), SIGNAL),
        (lambda: nn.Sequential(OnlineApproximation("fout", 3, window=3)), SIGNAL),
    ],
)
def test_a_module_from_meta_is_the_module(make: Callable[[], nn.Module], given: Tensor, fill):
    torch.manual_seed(0)
    module = make()
    with torch.device("meta"):
        other = make()
    fill(other, module.state_dict())
    torch.testing.assert_close(other(given)[0], module(given)[0], rtol=0, atol=0)
    # one parameter for those that share it, which trains as one
    names = [name for name, _ in module.named_parameters()]
    assert [name for name, _ in other.named_parameters()] == names
    assert [*other.state_dict()] == [*module.state_dict()]


@from_meta
def test_layers_share_what_was_loaded_last(fill):
    state = language_model().state_dict()
    state["head.weight"] = state["head.weight"] + 1
    loaded = language_model()
    loaded.load_state_dict(state)
    other = language_model().to("meta")
    fill(other, state)
    assert torch.equal(other.embedding.weight, loaded.embedding.weight)
    assert other.head.weight is other.embedding.weight


def test_layers_that_were_parted_stay_apart():
    model = language_model()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.to("meta").to_empty(device="cpu").load_state_dict(language_model().state_dict())
    assert model.head.weight is not model.embedding.weight


def test_a_checkpoint_with_one_name_of_a_shared_parameter_is_enough():
    state, model = language_model().state_dict(), language_model().to("meta")
    del state["head.weight"]
    model.load_state_dict(state, assign=True, strict=False)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, state["embedding.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_take_the_precision_of_weights_that_were_assigned(dtype):
    mixer = mixers.build("lmu", 4)
    other = copy.deepcopy(mixer).to("meta", torch.float64 if dtype == torch.float32 else torch.float32)
    other.load_state_dict(mixer.to(dtype).state_dict(), assign=True)
    assert torch.equal(other.A, mixer.A)
    assert other.A.dtype == dtype


def test_constants_have_the_digits_of_a_wider_dtype():
    class Third(RestoredModule):
        def __init__(self) -> None:
            super().__init__()
            self.add_constants()

        def constants(self) -> dict[str, Tensor]:
            return {"third": torch.tensor(1, dtype=torch.float64) / 3}

    module = Third()
    assert torch.equal(module.half().double().third, module.constants()["third"])
