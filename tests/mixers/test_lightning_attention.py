import pytest
import torch
from torch.nn import functional

from linrec import mixers
from linrec.mixers.lightning_attention import LightningAttention
from linrec.models import LanguageModel, ModelConfig
from linrec.testing import assert_agree, generator


def make(**arguments) -> LightningAttention:
    torch.manual_seed(0)
    mixer = mixers.build("lightning_attention", 8, **{"n_heads": 2} | arguments)
    assert isinstance(mixer, LightningAttention)
    return mixer.double()


@pytest.mark.parametrize(("layer", "fade"), [(0, 1.00001), (2, 1 - 2 / 3.00001 + 1e-5)])
def test_the_layer_is_its_equations(layer, fade):
    mixer, x = make(d_head=3), torch.randn(2, 7, 8, generator=generator(), dtype=torch.float64)
    mixer.place(layer, 4)
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 2)
    q, k, v = (functional.silu(part(x)).unflatten(-1, (2, 3)) for part in (mixer.q, mixer.k, mixer.v))
    o = torch.zeros(2, 7, 2, 3, dtype=torch.float64)
    for h in range(2):
        decay = torch.exp(torch.tensor(-(2.0 ** (-4 * (h + 1))) * fade, dtype=torch.float64))
        S = torch.zeros(2, 3, 3, dtype=torch.float64)
        for t in range(7):
            S = decay * S + k[:, t, h, :, None] * v[:, t, h, None]
            o[:, t, h] = torch.einsum("bk,bkv->bv", q[:, t, h], S)
        assert_agree(mixer(x)[1][:, h], S)
    o = o.flatten(-2)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    assert_agree(mixer(x)[0], mixer.out(torch.sigmoid(mixer.gate(x)) * o))


def test_places_count_the_layers_of_all_kinds():
    pattern = ("lightning_attention", "attention", "lightning_attention")
    model = LanguageModel(ModelConfig(vocab_size=3, d_model=8, n_layers=3, mixer=pattern))
    found = [mixer.fade for mixer in model.mixers if isinstance(mixer, LightningAttention)]
    assert found == pytest.approx([1.00001, 1 - 2 / 2.00001 + 1e-5])


def test_parameter_count():
    assert sum(p.numel() for p in make(d_head=3).parameters()) == 5 * 8 * 6 + 6
    assert sum(p.numel() for p in make(output_gate=False).parameters()) == 4 * 64 + 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_heads": 3}, "`n_heads`"),
        ({"d_head": 0}, "`d_head` must be at least 1"),
        ({"norm_eps": 0.0}, "`norm_eps`"),
    ],
)
def test_argument_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
