import pytest
import torch

from linrec.mixers import build
from linrec.mixers.linformer import Linformer
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.testing import assert_agree, generator

D, H, N, K = 6, 2, 12, 4


def make(**arguments) -> Linformer:
    torch.manual_seed(0)
    return build("linformer", D, **{"n_heads": H, "max_length": N, "rank": K} | arguments).double()


def inputs(time: int = 9) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer: Linformer, x: torch.Tensor) -> torch.Tensor:
    """Eq. 7, head by head, with E and F of shape (k, n)."""
    F, outputs = mixer.E if mixer.F is None else mixer.F, []
    for row in x:
        heads = []
        for h in range(H):
            part = slice(3 * h, 3 * h + 3)
            q, k, v = (layer(row)[:, part] for layer in (mixer.q, mixer.k, mixer.v))
            own = h if len(mixer.E) > 1 else 0
            n = min(len(row), N)
            share = (q @ (mixer.E[own, :n].T @ k[:n]).T / 3**0.5).softmax(-1)
            heads.append(share @ (F[own, :n].T @ v[:n]))
        outputs.append(mixer.out(torch.cat(heads, -1)))
    return torch.stack(outputs)


@pytest.mark.parametrize("sharing", ["none", "head", "key_value", "layer"])
@pytest.mark.parametrize("time", [9, N + 2])
def test_the_layer_is_its_equation(sharing, time):
    mixer, x = make(sharing=sharing), inputs(time)
    assert_agree(mixer(x)[0], by_hand(mixer, x))
    # the same numbers by pairs of steps
    reset = torch.zeros(2, time, dtype=torch.bool)
    reset[:, 0] = True
    assert_agree(mixer(x, reset=reset)[0], by_hand(mixer, x))


@torch.no_grad()
def test_where_sums_start_and_how_many_there_are():
    for sharing, count in (("none", 2 * H), ("head", 2), ("key_value", 1), ("layer", 1)):
        mixer = make(sharing=sharing)
        assert sum(p.numel() for p in mixer.parameters()) == 4 * D * D + D + count * N * K
        assert float(mixer.E.abs().max()) <= K**-0.5


def test_the_layers_of_a_model_share_one_matrix():
    def size(sharing: str, n_layers: int) -> int:
        config = SequenceClassifierConfig(
            n_outputs=2,
            n_features=3,
            d_model=D,
            n_layers=n_layers,
            bidirectional=False,
            mixer="linformer",
            mixer_args={"sharing": sharing, "rank": K, "max_length": N},
        )
        return sum(p.numel() for p in SequenceClassifier(config).parameters())

    own, shared = (size(sharing, 3) - size(sharing, 2) for sharing in ("key_value", "layer"))
    assert own - shared == N * K


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sharing": "heads"}, "there is no `sharing` 'heads'; did you mean 'head'"),
        ({"rank": 0}, "`rank` must be at least 1; got 0"),
        ({"max_length": 0}, "`max_length` must be at least 1; got 0"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
