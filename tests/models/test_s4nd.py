import math

import pytest
import torch

from linrec.models import S4ND, Block
from linrec.nn import FeedForward, groups_of
from linrec.testing import assert_agree, check_batch_independence, generator
from tests import released
from tests.tiers import thorough

D = 4
CASES = {
    "paper": {},
    "real": {"init": "real", "n_ssm": None, "output": "linear", "step_rescale": 0.5},
    "rank": {"rank": 2, "init": "lin", "bandlimit": 0.4, "n_ssm": 2, "output": "none", "activation": False},
    "causal": {"bidirectional": False, "discretization": "bilinear", "init": "inv", "rank": 3},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(**arguments) -> S4ND:
    torch.manual_seed(0)
    return S4ND(D, **{"d_state": 4, "dt_min": 0.1, "dt_max": 0.9, **arguments})


def moved(layer: S4ND) -> S4ND:
    """In float64, every parameter away from where it starts."""
    layer = layer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return layer


def image(*grid: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, *grid, D, generator=generator(), dtype=torch.float64)


def taps(layer: S4ND, axis: int, rank: int, channel: int, length: int) -> dict[int, torch.Tensor]:
    """K^(i)_l of a channel for -length < l < length, from powers."""
    kernel, n_sides = layer.kernels[axis], 1 + layer.bidirectional
    system = channel % len(kernel.A_log)
    A = -kernel.A_log[system].exp() + 0j
    if kernel.A_imag is not None:
        A = A + 1j * kernel.A_imag[system]
    plain = kernel.dt_log[channel].exp()
    dt = plain * layer.step_rescale
    B = torch.view_as_complex(kernel.B[system]) if kernel.is_complex else kernel.B[system]
    if kernel.discretization == "zoh":
        Abar, Bbar = torch.exp(dt * A), (torch.exp(dt * A) - 1) / A * B
    else:
        Abar, Bbar = (1 + dt * A / 2) / (1 - dt * A / 2), dt * B / (1 - dt * A / 2)
    found = {}
    for side in range(n_sides):
        C = kernel.C[(side * layer.rank + rank) * D + channel]
        C = 2 * torch.view_as_complex(C) if kernel.is_complex else C
        if layer.bandlimit is not None:
            C = C * (plain * A.imag.abs() / math.tau < layer.bandlimit / 2)
        for step in range(length - side):
            found[-1 - step if side else step] = (C * Abar**step * Bbar).sum().real
    return found


def by_hand(layer: S4ND, x: torch.Tensor) -> torch.Tensor:
    """Sums over all pairs of pixels of an image, with outer products of taps."""
    _, rows, columns, _ = x.shape
    channels = []
    for c in range(D):
        outputs = []
        for i in range(rows):
            for j in range(columns):
                y = layer.D[c] * x[:, i, j, c]
                for rank in range(layer.rank):
                    down, right = taps(layer, 0, rank, c, rows), taps(layer, 1, rank, c, columns)
                    for m in range(rows):
                        for n in range(columns):
                            if i - m in down and j - n in right:
                                y = y + down[i - m] * right[j - n] * x[:, m, n, c] / layer.rank
                outputs.append(y)
        channels.append(torch.stack(outputs, -1).unflatten(-1, (rows, columns)))
    y = torch.stack(channels, -1)
    if layer.out.activation:
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    if layer.out.output != "none":
        y = y @ layer.out.weight.T + layer.out.bias
    if layer.out.output == "glu":
        y = y[..., :D] * torch.sigmoid(y[..., D:])
    return y


@every_case
def test_the_layer_and_its_gradients_are_sums_over_pixels(case):
    layer, x = moved(make(**CASES[case])), image(2, 3).requires_grad_()
    ours, theirs = layer(x)[0], by_hand(layer, x)
    assert_agree(ours, theirs)
    wanted, weights = [x, *layer.parameters()], torch.randn(ours.shape, generator=generator(1)).double()
    assert_agree(
        torch.autograd.grad((ours * weights).sum(), wanted),
        torch.autograd.grad((theirs * weights).sum(), wanted),
    )


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("s4nd", {}),
        (
            "s4nd_rank",
            {"n_ssm": 6, "rank": 2, "bandlimit": 0.15, "bidirectional": False, "step_rescale": 2.0},
        ),
    ],
)
def test_the_released_layer(case, arguments):
    numbers = released.read(case)
    layer = S4ND(6, d_state=4, **arguments).double().requires_grad_(False)
    layer.load_state_dict({n.removeprefix("weights."): w for n, w in numbers.items() if "." in n or "D" in n})
    y, _ = layer(numbers["x"])
    assert released.error(y, numbers["y"]) < released.cases()[case]["error"]


def test_a_video_is_images_whose_frames_pass_a_kernel():
    layer = moved(make(axes=3, output="none", activation=False)).requires_grad_(False)
    x = torch.randn(2, 5, 3, 4, D, generator=generator(), dtype=torch.float64)
    single = make(output="none", activation=False).double().requires_grad_(False)
    for axis in range(2):
        single.kernels[axis].load_state_dict(layer.kernels[axis + 1].state_dict())
    single.D.zero_()
    frames = torch.stack([single(x[:, t])[0] for t in range(5)], 1)
    expected = layer.D * x
    for c in range(D):
        for lag, tap in taps(layer, 0, 0, c, 5).items():
            for t in range(max(lag, 0), min(5, 5 + lag)):
                expected[:, t, ..., c] += tap * frames[:, t - lag, ..., c]
    assert_agree(layer(x)[0], expected)


def test_all_pixels_hear_of_all_pixels_unless_kernels_are_causal():
    x = image(4, 5, batch=1)
    for bidirectional in (True, False):
        layer = moved(make(bidirectional=bidirectional)).requires_grad_(False)
        changed = x.clone()
        changed[:, 2, 3] += 1
        moves = (layer(changed)[0] - layer(x)[0]).abs().amax((0, 3)) > 0
        later = torch.zeros(4, 5, dtype=torch.bool)
        later[2:, 3:] = True
        assert torch.equal(moves, torch.ones_like(later) if bidirectional else later)


def test_where_it_starts_and_what_the_optimiser_is_told():
    layer = make()
    assert [kernel.A_log.shape for kernel in layer.kernels] == [(1, 2)] * 2
    assert [kernel.C.shape for kernel in layer.kernels] == [(2 * D, 2, 2)] * 2
    assert make(n_ssm=None).kernels[0].A_log.shape == (D, 2)
    of = {name: group.name for name, group in groups_of(layer).items()}
    marked = {name for name, group in of.items() if group == "transition"}
    names = ("dt_log", "A_log", "A_imag", "B")
    assert marked == {f"kernels.{axis}.{name}" for axis in range(2) for name in names}
    assert not [name for name in of if name.endswith(".D")]


@thorough
def test_it_is_a_layer_of_a_block():
    layer, x = make(), image(3, 4).float()
    y, state = Block(layer, FeedForward(D, 8))(x)
    assert y.shape == x.shape and state is None and layer.state_size == 0
    check_batch_independence(layer, x)
    assert_agree(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    assert layer.bfloat16()(x.bfloat16())[0].dtype == torch.bfloat16


def test_errors():
    layer = make()
    for call, message in {
        lambda: layer(torch.zeros(2, 5, D)): r"\(batch, 2 axes, d_model = 4\); got \(2, 5, 4\)",
        lambda: layer(
            torch.zeros(2, 5, 3, D), torch.zeros(2)
        ): "`state`, `reset` and `dt` must be None for S4ND",
        lambda: make(axes=0): "`axes` must be at least 1; got 0",
        lambda: make(n_ssm=3): "`n_ssm` must be a positive divisor of `channels` = 4; got 3",
        lambda: make(bandlimit=0.0): "`bandlimit` must be positive and finite; got 0.0",
        lambda: make(init="real", bandlimit=0.5): '`bandlimit` must be None with `init="real"`',
        lambda: make(step_rescale=-1.0): "`step_rescale` must be positive and finite; got -1.0",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="Embed pixels first"):
        layer(torch.zeros(2, 5, 3, D, dtype=torch.long))
