import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn import functional

from linrec.models import ImageClassifier, ImageClassifierConfig, image_preset, image_preset_names
from linrec.testing import assert_agree, generator
from tests.tiers import thorough

CONFIG = ImageClassifierConfig(
    n_outputs=3, patch_size=2, mixer="hgru", d_model=8, n_layers=2, d_channel_mixing=12
)


def make(config: ImageClassifierConfig = CONFIG) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(config).double()


def images(height: int = 6, width: int = 8) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=generator(), dtype=torch.float64)


def count(config: ImageClassifierConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ImageClassifier(config).parameters())


def norm(x: torch.Tensor, layer: torch.nn.LayerNorm) -> torch.Tensor:
    return functional.layer_norm(x, (8,), layer.weight, layer.bias)


def test_the_classifier_written_out():
    model = make()
    weight, x = model.patches.weight.reshape(8, 12), images()
    patches = [[x[:, :, i : i + 2, j : j + 2].reshape(2, 12) for j in range(0, 8, 2)] for i in range(0, 6, 2)]
    y = torch.stack([torch.stack(row, 1) for row in patches], 1) @ weight.T + model.patches.bias
    for block in model.blocks:
        right, left, down, up = block.mixer.mixers
        z = norm(y, block.mixer_norm)
        for i in range(3):
            row = z[:, i]
            both = right(row)[0] + left(row.flip(1))[0].flip(1)
            y = y.index_add(1, torch.tensor([i]), both[:, None])
        for j in range(4):
            column = z[:, :, j]
            both = down(column)[0] + up(column.flip(1))[0].flip(1)
            y = y.index_add(2, torch.tensor([j]), both[:, :, None])
        y = y + block.channel_mixing(norm(y, block.channel_mixing_norm))
    expected = norm(y, model.norm).mean((1, 2)) @ model.head.weight.T + model.head.bias
    assert_agree(model(images()), expected)


def test_s4nd_is_a_mixer_of_the_classifier():
    arguments = {"s4nd": {"d_state": 4, "bandlimit": 0.5}}
    model = make(replace(CONFIG, mixer=("s4nd", "hgru"), mixer_args=arguments))
    assert [type(block.mixer).__name__ for block in model.blocks] == ["S4ND", "ImageScan"]
    assert model.blocks[0].mixer.bandlimit == 0.5
    x = images().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad.abs().gt(0).all()


def test_every_parameter_and_pixel_has_a_gradient():
    for unshared in (None, ("theta",), ()):
        model = make(replace(CONFIG, unshared=unshared, combine="concatenate"))
        x = images().requires_grad_()
        model(x).square().sum().backward()
        assert x.grad.abs().gt(0).all()
        assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_images_of_any_size_that_patches_divide():
    model = make()
    assert model(images(2, 2)).shape == model(images(10, 4)).shape == (2, 3)
    assert_agree(model(images())[:1], model(images()[:1]))


def test_directions_of_the_blocks():
    directions = ("down", "forward")
    for unshared, n_mixers, n_gammas in ((None, 2, 2), (("theta",), 2, 1), ((), 1, 1)):
        model = make(replace(CONFIG, directions=directions, unshared=unshared))
        assert [block.mixer.directions for block in model.blocks] == [directions] * 2
        assert [len(block.mixer.mixers) for block in model.blocks] == [n_mixers] * 2
        # a set of bounds for each direction that has parameters of its own, over both layers
        gammas = [p.shape for name, p in model.named_parameters() if name.endswith("gamma")]
        assert gammas == [(2, 8)] * n_gammas


@thorough
def test_compile():
    torch.compiler.reset()
    model = make(replace(CONFIG, n_layers=1, directions=("up", "backward"), unshared=("theta",)))
    assert_agree(torch.compile(model, fullgraph=True, backend="aot_eager")(images()), model(images()))


@thorough
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_deit_is_the_vision_transformer_of_transformers():
    """Without distillation DeiT is a vision transformer; the weights of either give the other's logits."""
    transformers = pytest.importorskip("transformers")
    options = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "image_size": 6,
        "patch_size": 2,
        "num_labels": 3,
        "layer_norm_eps": 1e-6,
    }
    torch.manual_seed(0)
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**options)).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    attention = {"n_heads": 2, "positions": "none", "bias": True, "causal": False}
    config = replace(
        CONFIG,
        mixer="attention",
        mixer_args=attention,
        directions=("forward",),
        grid=(3, 3),
        class_token=True,
        norm_eps=1e-6,
    )
    ours, x = make(config), images(6, 6)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    weights = list(theirs.parameters())
    with torch.no_grad():
        assert (ours(x) - theirs(x).logits).abs().max() > 0.1
        for mine, name in released_names(theirs, ours):
            mine.copy_(dict(theirs.named_parameters())[name].reshape(mine.shape))
    assert len({name for _, name in released_names(theirs, ours)}) == len(weights)
    assert_agree(ours(x), theirs(x).logits)


def released_names(theirs: torch.nn.Module, ours: ImageClassifier) -> list[tuple[torch.Tensor, str]]:
    """Each parameter here, with the name of the same parameter in transformers."""
    names = [name for name, _ in theirs.named_parameters()]

    def named(*ends: str) -> list[str]:
        return [name for end in ends for name in names if name.endswith(end)]

    first = [ours.token, ours.positions, ours.patches.weight, ours.patches.bias]
    pairs = list(
        zip(
            first,
            named("cls_token", "position_embeddings", "projection.weight", "projection.bias"),
            strict=True,
        )
    )
    for layer, block in enumerate(ours.blocks):
        own = [name for name in names if f".{layer}." in name]
        mixer, channels = block.mixer, block.channel_mixing
        parts = {
            "norm_before": block.mixer_norm,
            "q_proj": mixer.q,
            "k_proj": mixer.k,
            "v_proj": mixer.v,
            "o_proj": mixer.out,
            "norm_after": block.channel_mixing_norm,
            "fc1": next(m for m in channels.modules() if getattr(m, "out_features", 0) == 12),
            "fc2": next(m for m in channels.modules() if getattr(m, "in_features", 0) == 12),
        }
        for key, part in parts.items():
            for kind in ("weight", "bias"):
                (name,) = [name for name in own if name.endswith(f"{key}.{kind}")]
                pairs.append((getattr(part, kind), name))
    last = [ours.norm.weight, ours.norm.bias, ours.head.weight, ours.head.bias]
    ends = ("vit.layernorm.weight", "vit.layernorm.bias", "classifier.weight", "classifier.bias")
    return pairs + list(zip(last, named(*ends), strict=True))


def test_positions_need_images_of_their_grid():
    model = make(replace(CONFIG, grid=(3, 4)))
    logits = model(images(6, 8))
    with torch.no_grad():
        model.positions[0, 0] += 1
    assert (model(images(6, 8)) - logits).abs().max() > 1e-3
    with pytest.raises(ValueError, match="`images` must have 3 x 4 patches, as `grid` says; got 4 x 4"):
        model(images(8, 8))


def test_the_counts_of_deit():
    counts = {"deit-tiny": 5_717_416, "deit-small": 22_050_664, "deit-base": 86_567_656}
    assert {name: count(image_preset(name)) for name in counts} == counts


def linear(d_in: int, d_out: int) -> int:
    return d_in * d_out + d_out


@thorough
@pytest.mark.parametrize(
    ("name", "d", "millions"), [("deit-tiny-hgrn", 192, 6.1), ("deit-small-hgrn", 384, 23.7)]
)
def test_presets_are_table_7(name, d, millions):
    config = image_preset(name)
    # candidate (2), forget gate, output gate (2), output (2); norm of the mixer, theta, lower bound
    hgru = 3 * linear(d, d) + linear(d, 2 * d) + linear(2 * d, d) + 2 * 2 * d + d + d
    theta = d
    glu = 2 * linear(d, 2 * d) + linear(2 * d, d)
    expected = linear(3 * 14 * 14, d) + 12 * (hgru + theta + glu + 2 * 2 * d) + 2 * d + linear(d, 1000)
    assert count(config) == expected
    assert round(expected / 1e6, 1) == millions
    # rows and columns have two more phases per layer, and round to the same
    rows_and_columns = count(replace(config, directions=("right", "left", "down", "up")))
    assert rows_and_columns == expected + 12 * 2 * theta
    assert round(rows_and_columns / 1e6, 1) == millions
    # DeiT's own patches, or a mixer per direction, have more
    assert count(replace(config, patch_size=16)) == expected + 3 * (16**2 - 14**2) * d
    assert count(replace(config, unshared=None)) == expected + 12 * (hgru - theta)


def test_image_preset_names_and_errors():
    assert [image_preset(name).n_layers for name in image_preset_names()] == [12] * 5
    assert image_preset("deit_tiny_hgrn") == image_preset("deit-tiny-hgrn")
    with pytest.raises(ValueError, match="'deit-tin'; did you mean 'deit-tiny'"):
        image_preset("deit-tin")


def test_a_config_survives_json():
    config = image_preset("deit-tiny-hgrn")
    assert ImageClassifierConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patch_size": 0}, "`patch_size` must be at least 1; got 0"),
        ({"n_channels": 0}, "`n_channels` must be at least 1; got 0"),
        ({"n_outputs": 0}, "`n_outputs` must be at least 1; got 0"),
        ({"dropout": 1.0}, "`dropout` must be in [0, 1); got 1.0"),
        ({"directions": ("rows",)}, "there is no direction of an image 'rows'"),
        ({"directions": ()}, "`directions` must name at least one direction"),
        (
            {"grid": (0, 2)},
            "`grid` must be two numbers of at least 1, rows and columns of patches; got (0, 2)",
        ),
        ({"class_token": True}, '`class_token` needs `directions=("forward",)` and no "s4nd"'),
        ({"class_token": True, "directions": ("forward",), "mixer": "s4nd"}, "`class_token` needs"),
    ],
)
def test_errors_of_the_config(arguments, message):
    with pytest.raises(ValueError) as error:
        ImageClassifierConfig(**arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (images()[0], ValueError, "`images` must have shape (batch, 3, height, width); got (3, 6, 8)"),
        (images()[:, :1], ValueError, "`images` must have shape (batch, 3, height, width); got (2, 1, 6, 8)"),
        (images(5), ValueError, "in multiples of `patch_size` = 2; got 5 x 8. Resize, crop or pad them."),
        (images(0), ValueError, "in multiples of `patch_size` = 2; got 0 x 8"),
        (
            images().byte(),
            TypeError,
            "`images` must be real numbers; got torch.uint8. Convert: `images / 255`",
        ),
    ],
)
def test_errors_of_inputs(x, kind, message):
    with pytest.raises(kind) as error:
        make()(x)
    assert message in str(error.value)
