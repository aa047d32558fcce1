import pytest
import torch

from linrec import mixers
from linrec.mixers.hgru import HGRU
from linrec.models import ImageScan
from linrec.models.image_scan import IMAGE_DIRECTIONS
from linrec.testing import assert_agree, generator
from tests.mixers.variants import OF_FAMILIES
from tests.tiers import tiered

D, H, W = 8, 3, 4


def build(name: str = "hgru") -> mixers.Mixer:
    return mixers.build(name, D).double()


def image(batch: int = 2, h: int = H, w: int = W) -> torch.Tensor:
    return torch.randn(batch, h, w, D, generator=generator(), dtype=torch.float64)


def path(direction: str, h: int, w: int) -> list[list[tuple[int, int]]]:
    """The sequences of a direction, each the pixels that it visits, in their order."""
    rows = [[(i, j) for j in range(w)] for i in range(h)]
    columns = [[(i, j) for i in range(h)] for j in range(w)]
    lines = {"right": rows, "down": columns, "forward": [[pixel for row in rows for pixel in row]]}
    against = {"left": "right", "up": "down", "backward": "forward"}
    if direction in against:
        return [line[::-1] for line in lines[against[direction]]]
    return lines[direction]


def by_loops(x: torch.Tensor, directions, mixers) -> torch.Tensor:
    """The sum over all directions, one sequence of pixels after the other."""
    pixels = {(i, j): 0 for i in range(x.shape[1]) for j in range(x.shape[2])}
    for direction, mixer in zip(directions, mixers, strict=True):
        for line in path(direction, *x.shape[1:3]):
            y, _ = mixer(torch.stack([x[:, i, j] for i, j in line], 1))
            for n, pixel in enumerate(line):
                pixels[pixel] = pixels[pixel] + y[:, n]
    return torch.stack(
        [torch.stack([pixels[i, j] for j in range(x.shape[2])], 1) for i in range(x.shape[1])], 1
    )


def gradients(y: torch.Tensor, wanted: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(y.shape, generator=generator(1), dtype=y.dtype)
    return torch.autograd.grad((y * weights).sum(), wanted)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "directions", [("right", "left", "down", "up"), IMAGE_DIRECTIONS, ("up",), ("down", "left")]
)
def test_explicit_loops_over_lines(directions, shared):
    torch.manual_seed(0)
    made = [build()] if shared else [build() for _ in directions]
    scan = ImageScan(made, directions=directions)
    x = image().requires_grad_()
    y, state = scan(x)
    expected = by_loops(x, directions, made * len(directions) if shared else made)
    wanted = [x, *(p for p in scan.parameters() if p.requires_grad)]
    assert_agree(y, expected)
    assert_agree(gradients(y, wanted), gradients(expected, wanted), "gradients")
    assert state is None


@pytest.mark.parametrize("name", tiered(OF_FAMILIES[:3], OF_FAMILIES, mixers.names()))
def test_any_mixer(name):
    torch.manual_seed(0)
    mixer = build(name).eval()
    assert_agree(
        ImageScan(mixer)(image())[0], by_loops(image(), ("right", "left", "down", "up"), [mixer] * 4)
    )


def test_mean_and_concatenation():
    torch.manual_seed(0)
    made = [build(), build()]
    x, both = image(), ("right", "up")
    parts = [by_loops(x, both[i : i + 1], made[i : i + 1]) for i in (0, 1)]
    assert_agree(ImageScan(made, directions=both, combine="mean")(x)[0], (parts[0] + parts[1]) / 2)
    scan = ImageScan(made, directions=both, combine="concatenate").double()
    assert_agree(scan(x)[0], torch.cat(parts, -1) @ scan.project.weight.T + scan.project.bias)


@pytest.mark.parametrize("directions", [("right", "left", "down", "up"), ("down",), ("forward", "backward")])
def test_tokens_of_a_grid(directions):
    torch.manual_seed(0)
    scan = ImageScan(build(), directions=directions, grid=(H, W))
    x = image()
    assert_agree(scan(x.reshape(2, H * W, D))[0], scan(x)[0].reshape(2, H * W, D))
    # an image says its own size
    assert scan(image(h=2, w=5))[0].shape == (2, 2, 5, D)


def test_a_pixel_hears_from_its_row_and_column():
    torch.manual_seed(0)
    x = image(1).requires_grad_()
    y, _ = ImageScan(build())(x)
    (reached,) = torch.autograd.grad(y[0, 1, 2].sum(), x)
    heard = reached[0].abs().sum(-1).gt(0)
    assert {tuple(pixel) for pixel in heard.nonzero().tolist()} == {(1, j) for j in range(W)} | {
        (i, 2) for i in range(H)
    }


def test_lower_bounds_are_shared_within_a_direction():
    layers = [ImageScan([HGRU(D) for _ in range(4)]) for _ in range(3)]
    ImageScan.share(layers)
    for i in range(4):
        assert len({id(layer.mixers[i].bounds) for layer in layers}) == 1
        assert [layer.mixers[i].layer for layer in layers] == [0, 1, 2]
    assert len({id(mixer.bounds) for mixer in layers[0].mixers}) == 4


def test_errors():
    with pytest.raises(ValueError, match="'rigth'; did you mean 'right'"):
        ImageScan(build(), directions=("rigth",))
    for directions in ((), ("up", "up")):
        with pytest.raises(ValueError, match="at least one direction, and each once; got"):
            ImageScan(build(), directions=directions)
    with pytest.raises(
        ValueError, match="one for each of right, left, down, up, or a single mixer for all; got 2"
    ):
        ImageScan([build(), build()])
    scan = ImageScan(build(), grid=(H, W))
    with pytest.raises(ValueError, match=r"\(batch, 12, 8\).*3 x 4; got \(2, 11, 8\)"):
        scan(torch.zeros(2, 11, D))
    with pytest.raises(ValueError, match=r"columns, 8\); got \(2, 12, 8\).*`grid`"):
        ImageScan(build())(torch.zeros(2, 12, D))
    with pytest.raises(ValueError, match=r"`state`.*ImageScan"):
        scan(image(), torch.zeros(2, D))
    with pytest.raises(ValueError, match="`reset` and `dt`"):
        scan(image(), reset=torch.zeros(2, H * W, dtype=torch.bool))
    with pytest.raises(ValueError, match="`reset` and `dt`"):
        scan(image(), dt=torch.ones(2, H * W))
