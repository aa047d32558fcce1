import pytest
import torch
from torch.nn import functional

from linrec import mixers, testing
from linrec.lab.distillation import distill
from linrec.models import LanguageModel, ModelConfig
from linrec.testing import assert_agree, generator
from linrec.trees import leaves
from tests.tiers import thorough, tiered

D, L = 4, 24


SMALL = {
    "hyena": {"length": L, "d_filter": 6, "omega": 1.0},
    "sgconv": {"length": L, "d_kernel": 3},
    "tnn": {"length": L, "d_position": 6, "decay": 0.9},
}


def make(name: str = "hyena", **arguments) -> mixers.Mixer:
    torch.manual_seed(0)
    return mixers.build(name, D, **SMALL.get(name, {}) | arguments)


def songs(rows: int, time: int, seed: int) -> torch.Tensor:
    """Rows of 12 notes, of which most are one of three that the row has for its own."""
    draw = generator(seed)
    own = torch.randint(12, (rows, 3), generator=draw)
    notes = own.gather(1, torch.randint(3, (rows, time), generator=draw))
    others = torch.randint(12, (rows, time), generator=draw)
    return torch.where(torch.rand(rows, time, generator=draw) < 0.9, notes, others)


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


def decoded(model: LanguageModel, tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt read at once and of one token after another; sizes of the state."""
    logits, state = model(tokens[:, :prompt])
    outputs, sizes = [logits], []
    for n in range(prompt, tokens.shape[1]):
        y, state = model(tokens[:, n : n + 1], state)
        outputs.append(y)
        sizes.append(sum(part.numel() for part in leaves(state)))
    return torch.cat(outputs, 1), sizes


@thorough
def test_a_trained_hyena_decodes_as_a_recurrence_with_the_loss_of_the_convolution():
    torch.manual_seed(0)
    time = 48
    # without a short convolution, all memory is the filters'
    arguments = {"length": time, "conv_size": None, "omega": 3.0}
    model = LanguageModel(
        ModelConfig(
            vocab_size=12, d_model=24, n_layers=2, d_channel_mixing=48, mixer="hyena", mixer_args=arguments
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(150):
        tokens = songs(16, time, seed=10 + step)
        logits, _ = model(tokens)
        error = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    tokens = songs(32, time, seed=1)
    with torch.no_grad():
        convolution = loss(model(tokens)[0], tokens)
        # a note that nothing is known of has 2.48
        assert convolution < 1.9
        logits, sizes = decoded(distill(model, 8), tokens, prompt=20)
        assert abs(loss(logits, tokens) / convolution - 1) < 0.01
        assert len(set(sizes)) == 1
        # which says something: without memory it is another loss
        forgetful, _ = decoded(distill(model, 8, length=1), tokens, prompt=20)
        assert loss(forgetful, tokens) / convolution - 1 > 0.1


@pytest.mark.parametrize("method", ["fit", "exact"])
@pytest.mark.parametrize("name", SMALL)
def test_laws_of_distilled_mixers(name, method):
    testing.check_mixer(distill(make(name), 3, method=method), time=9, long=2048, compiler=None)


def test_exact_recurrences_are_the_convolution():
    mixer = make(order=3).double()
    x = torch.randn(2, L, D, generator=generator(), dtype=torch.float64)
    y, _ = mixer(x)
    exact = distill(mixer, method="exact")
    assert_agree(exact(x)[0], y, "all steps at once")
    z, state = [], None
    for n in range(L):
        one, state = exact(x[:, n : n + 1], state)
        z.append(one)
    assert_agree(torch.cat(z, 1), y, "step by step")
    assert [part.shape for part in state.filters] == [(2, D, L // 2)] * 3
    # fewer taps than the filters have
    short = distill(mixer, method="exact", length=10)
    assert_agree(short(x[:, :10])[0], y[:, :10])
    assert float((short(x)[0] - y).detach().abs().max()) > 1e-3


def test_fits_follow_the_filters_to_their_end_and_behind_it():
    mixer = make(conv_size=None).double()
    fitted = distill(mixer, 10)
    for before, after in zip(mixer.filters, fitted.filters, strict=True):
        difference = (after.kernel(3 * L) - before.kernel(3 * L)).detach()
        assert float(difference.norm() / before.kernel(L).detach()[:, 1:].norm()) < 0.05
        assert after.kernel(0).shape == (D, 0)


@thorough
@pytest.mark.parametrize("name", tiered(["sgconv"], ["hyena", "tnn"]))
def test_distilled_layers_in_bfloat16_compute_what_they_do_in_float32(name):
    torch.manual_seed(0)
    mixer = distill(mixers.build(name, 32, length=256), 16)
    x = torch.randn(2, 512, 32, generator=generator()).bfloat16()
    with torch.no_grad():
        expected, found = mixer(x.float())[0], mixer.bfloat16()(x)[0]
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_the_original_stays_and_the_copy_loads_and_learns():
    mixer = make().eval()
    weights = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    copy = distill(mixer, 4)
    assert mixer.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in mixer.state_dict().items())
    assert not copy.training and not any(module.training for module in copy.modules())
    torch.manual_seed(5)
    twin = distill(mixers.build("hyena", D, length=L, d_filter=6), 4).eval()
    twin.load_state_dict(copy.state_dict())
    x = torch.randn(2, 30, D, generator=generator())
    assert torch.equal(twin(x)[0], copy(x)[0])
    copy(x)[0].square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in copy.filters.parameters())


def test_errors():
    for message, arguments in {
        "there is no `method` of distillation 'exakt'; did you mean 'exact'": {"method": "exakt"},
        "`modes` and `length` must be at least 1; got 0 and None": {"modes": 0},
        "`modes` and `length` must be at least 1; got 16 and 0": {"length": 0},
    }.items():
        with pytest.raises(ValueError) as error:
            distill(make(), **arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="`model` must have long convolutions; GLA has none"):
        distill(make("gla"))


def test_a_layer_that_has_streamed_streams_after_distillation():
    mixer, x = mixers.build("tnn", 8, length=64), torch.randn(1, 5, 8)
    _, state = mixer(x)
    mixer(x, state)
    distilled = distill(mixer, 8)
    _, state = distilled(x)
    distilled(x, state)
