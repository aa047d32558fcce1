import itertools
import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.sgconv import SGConv
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, L = 3, 21
CASES = {
    "paper": {},
    "decays": {"alpha": (0.3, 0.9), "output": "glu", "activation": False},
    "inverse": {"alpha": (0.8, 0.2), "alpha_spacing": "inverse"},
    "nearest": {"upsampling": "nearest", "output": "none"},
    "one scale": {"d_kernel": 50},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> SGConv:
    torch.manual_seed(0)
    mixer = build("sgconv", d_model, **{"length": L, "d_kernel": 3} | arguments)
    assert isinstance(mixer, SGConv)
    return mixer


def moved(mixer: SGConv) -> SGConv:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 2 * L) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def scales_by_hand(
    w: torch.Tensor, *, alpha=(0.5, 0.5), alpha_spacing="linear", upsampling="linear", **_
) -> torch.Tensor:
    """The kernel before its norm, one tap after the other, (d, taps)."""
    rows = []
    for channel in range(w.shape[1]):
        share = channel / (w.shape[1] - 1)
        decay = alpha[0] + (alpha[1] - alpha[0]) * share
        if alpha_spacing == "inverse":
            decay = 1 / (1 / alpha[0] + (1 / alpha[1] - 1 / alpha[0]) * share)
        taps = []
        for i, scale in enumerate(w[:, channel]):
            factor, size = 2 ** max(i - 1, 0), len(scale)
            for n in range(factor * size):
                # middles of the short taps are where they were
                place = min(max((n + 0.5) / factor - 0.5, 0), size - 1)
                below = math.floor(place)
                above, share = min(below + 1, size - 1), place - below
                value = (
                    scale[n // factor]
                    if upsampling == "nearest"
                    else (1 - share) * scale[below] + share * scale[above]
                )
                taps.append(decay**i * value)
        rows.append(torch.stack(taps))
    return torch.stack(rows)


def by_hand(mixer: SGConv, x: torch.Tensor, start: torch.Tensor, **arguments):
    Z = scales_by_hand(start, **arguments).square().sum(1, keepdim=True).sqrt()
    K = scales_by_hand(mixer.filter.w, **arguments) / Z
    y = mixer.filter.D * x
    y = y + torch.stack(
        [sum(K[:, j] * x[:, t - j] for j in range(min(L, t + 1))) for t in range(x.shape[1])], 1
    )
    if mixer.out.activation:
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    if mixer.out.output != "none":
        y = y @ mixer.out.weight.T + mixer.out.bias
    if mixer.out.output == "glu":
        y = y[..., :D] * torch.sigmoid(y[..., D:])
    return y


@every_case
def test_the_layer_and_its_gradients_are_the_papers_kernel(case):
    mixer = make(**CASES[case]).double()
    start = mixer.filter.w.detach().clone()
    # a norm of float32 weights
    mixer.filter.Z = scales_by_hand(start, **CASES[case]).norm(dim=1, keepdim=True)
    mixer, x = moved(mixer), inputs().requires_grad_()
    ours, theirs = mixer(x)[0], by_hand(mixer, x, start, **CASES[case])
    assert_agree(ours, theirs, "outputs")
    dy = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    for mine, other in zip(
        *(torch.autograd.grad(y, [x, *mixer.parameters()], dy) for y in (ours, theirs)), strict=True
    ):
        assert_agree(mine, other, "gradients")


def test_parameters_and_where_they_start():
    d, length, size = 30, 1000, 64
    mixer = make(d, length=length, d_kernel=size).requires_grad_(False)
    # 64, 64, 128, 256 and 512 taps
    assert mixer.filter.w.shape == (5, d, size)
    assert sum(p.numel() for p in mixer.parameters()) == 5 * d * size + d + d * d + d
    assert float(mixer.filter.w.std()) == pytest.approx(1, abs=0.05)
    kernel = mixer.filter.kernel(2 * length)
    kernel[:, 0] -= mixer.filter.D
    # all but the 24 taps that are cut
    norm = kernel.norm(dim=1)
    assert float(norm.min()) > 0.99 and float(norm.max()) <= 1 + 1e-6
    assert not kernel[:, length:].any() and bool(kernel[:, length - 1].all())
    parts = kernel[:, :960].split([64, 64, 128, 256, 448], 1)
    sizes = [float(part.square().mean().sqrt()) for part in parts]
    # upsampling by lines takes a third of the variance, or a little less
    assert [b / a for a, b in itertools.pairwise(sizes)] == pytest.approx([0.5, 0.42, 0.5, 0.5], abs=0.08)
    of = groups_of(mixer)
    assert of["filter.w"].name == "transition" and of["filter.D"].name == "default"


def test_the_state_is_the_last_inputs():
    mixer, x = moved(make()), inputs(50)
    for time in (7, 50):
        assert torch.equal(mixer(x[:, :time])[1], x[:, max(0, time - L + 1) : time])


@every_case
def test_short_sequences_have_the_first_taps(case):
    h = moved(make(**CASES[case])).filter
    for length in (0, 1, 3, 4, 6, 7, 12, 13, L, L + 1):
        assert torch.equal(h.kernel(length), h.kernel(2 * L)[:, :length])


def test_token_mixing_is_the_kernel_by_distance():
    mixer, x, reset = moved(make()), inputs(30), reset_mask(2, 30, rate=0.1)
    kernel, found = mixer.filter.kernel(30).abs().mean(0), mixer.token_mixing(x, reset=reset)
    assert not kernel[L:].any()
    for b in range(2):
        for n in range(30):
            for m in range(30):
                seen = m <= n and not reset[b, m + 1 : n + 1].any()
                assert found[b, n, m] == (kernel[n - m] if seen else 0)


def test_errors():
    for message, arguments in {
        "there is no `output` 'gelu'": {"output": "gelu"},
        "there is no `alpha_spacing` 'log'": {"alpha_spacing": "log"},
        "there is no `upsampling` 'cubic'": {"upsampling": "cubic"},
        "`length` must be at least 1; got 0": {"length": 0},
        "`d_kernel` must be at least 1; got 0": {"d_kernel": 0},
        "`alpha` must be decays above 0 and at most 1, of the first and the last channel; got (0.5, 2.0)": {
            "alpha": (0.5, 2.0)
        },
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
