import json
from dataclasses import asdict, replace

import pytest
import torch

from linrec.convert import Options, recurrent_gemma
from linrec.mixers.mlstm import MLSTM
from linrec.mixers.slstm import SLSTM
from linrec.models import LanguageModel, ModelConfig, preset, preset_names
from linrec.nn import FeedForward, groups_of
from tests import released
from tests.tiers import thorough, tiered


def count(config: ModelConfig) -> int:
    # shapes are enough
    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(config).parameters())


def linear(d_in: int, d_out: int) -> int:
    return d_in * d_out + d_out


def by_hand(vocab: int, outputs: int, d: int, layers: int, d_channel_mixing: int, n_square: int) -> int:
    """Parameters of appendix C with `n_square` d x d projections per mixer, pre-norm, untied."""
    block = n_square * linear(d, d) + linear(d, d_channel_mixing) + linear(d_channel_mixing, d) + 2 * 2 * d
    return vocab * d + layers * block + 2 * d + linear(d, outputs)


def test_memory_horizon_is_table_3():
    config = preset("memory-horizon")
    assert count(config) == by_hand(6, 50, 64, 4, 128, n_square=5) == 154_290
    model = LanguageModel(config)
    assert len(model.mixers) == 4
    for mixer in model.mixers:
        assert (mixer.d_model, mixer.n_heads, mixer.d_key, mixer.d_value) == (64, 64, 1, 1)
        assert mixer.transition.magnitude_activation == "sigmoid"
        assert mixer.transition.phase_activation == "identity"


def test_wikitext103_is_table_4_in_the_reading_nearest_to_125_million():
    config = preset("wikitext103")
    readings = {
        "to the letter": (replace(config, mixer_args={}), 5, 114_267_217),
        "output projection": (replace(config, mixer_args={"output_projection": True}), 6, 118_947_217),
        "the preset": (config, 7, 123_627_217),
    }
    for what, (reading, n_square, expected) in readings.items():
        assert count(reading) == by_hand(50257, 50257, 624, 12, 1872, n_square) == expected, what
    # tied, every reading is far below; with a third matrix in the channel mixing it is beyond, and no FNN
    assert count(replace(config, tie_embeddings=True)) == 123_627_217 - linear(624, 50257) == 92_216_592
    assert 114_267_217 + 12 * linear(624, 1872) == 128_307_217


def test_wikitext103_has_624_heads_of_one_channel():
    with torch.device("meta"):
        mixers = LanguageModel(preset("wikitext103")).mixers
    assert {(m.n_heads, m.d_key, m.d_value) for m in mixers} == {(624, 1, 1)}


def test_wikitext103_hgrn_is_table_1():
    config = preset("wikitext103-hgrn")
    d, glu = 512, 2 * linear(512, 1024) + linear(1024, 512)
    # candidate (2), forget gate, output gate (2) and output of the mixer; its norm, theta and lower bound
    hgru = 3 * linear(d, d) + linear(d, 2 * d) + linear(2 * d, d) + 2 * 2 * d + d
    expected = 50265 * d + 6 * (hgru + glu + 2 * 2 * d + d) + 2 * d
    # 46.25M in the paper
    assert count(config) == expected == 46_248_448


@pytest.mark.parametrize(
    ("name", "vocab", "d", "layers", "millions"),
    [
        # the paper gives sizes alone; the widths and depths are those that the docstring argues for
        ("hgrn-125m", 50257, 768, 11, 123.1),
        ("hgrn-150m", 50272, 768, 14, 146.2),
        ("hgrn-350m", 50272, 1024, 22, 351.8),
        ("hgrn-1b", 50272, 2048, 16, 976.1),
    ],
)
def test_hgrns_larger_models_have_the_sizes_of_tables_2_to_5(name, vocab, d, layers, millions):
    config = preset(name)
    glu = 2 * linear(d, 2 * d) + linear(2 * d, d)
    hgru = 3 * linear(d, d) + linear(d, 2 * d) + linear(2 * d, d) + 2 * 2 * d + d
    expected = vocab * d + layers * (hgru + glu + 2 * 2 * d + d) + 2 * d
    assert count(config) == expected
    assert round(expected / 1e6, 1) == millions
    size = {"125m": 125e6, "150m": 150e6, "350m": 350e6, "1b": 1e9}[name.removeprefix("hgrn-")]
    assert expected == pytest.approx(size, rel=0.03)


def test_the_published_weights_have_the_sizes_of_the_presets():
    """In float32, without biases, which the authors left out; gigabytes as their pages say."""
    for name, gigabytes, digits in (("hgrn-150m", 0.584, 3), ("hgrn-350m", 1.41, 2), ("hgrn-1b", 3.9, 1)):
        config = preset(name)
        biases = config.n_layers * (8 + 5) * config.d_model
        assert round(4 * (count(config) - biases) / 1e9, digits) == gigabytes


@thorough
@pytest.mark.parametrize(
    ("size", "of_7_1", "of_1_0"),
    tiered(
        [("125m", 163.7, 163.8), ("350m", 408.4, 409.3)],
        rare=[("760m", 839.7, 840.4), ("1.3b", 1420.1, 1422.6)],
    ),
)
def test_xlstms_have_the_sizes_of_the_paper(size, of_7_1, of_1_0):
    """Without the biases of norms and of the channel mixing, which the released code has not."""
    config = preset(f"xlstm-7-1-{size}")
    mlstm = replace(config, mixer="mlstm", channel_mixing="none")
    for reading, millions in ((config, of_7_1), (mlstm, of_1_0)):
        with torch.device("meta"):
            model = LanguageModel(reading)
        biases = model.norm.bias.numel()
        for block in model.blocks:
            layers = [block.mixer_norm]
            if block.channel_mixing is not None:
                layers += [block.channel_mixing_norm, *block.channel_mixing.children()]
            biases += sum(layer.bias.numel() for layer in layers)
        assert round((count(reading) - biases) / 1e6, 1) == millions
    assert config.mixer.count("slstm") == (2 if size == "125m" else 6)


@pytest.mark.parametrize("size", ["125m", "350m"])
def test_xlstms_start_as_the_released_code_by_their_places_among_all_blocks(size):
    numbers = released.read("slstm_places")
    torch.manual_seed(0)
    model = LanguageModel(replace(preset(f"xlstm-7-1-{size}"), vocab_size=5, d_model=64))
    slstm = [mixer for mixer in model.mixers if isinstance(mixer, SLSTM)]
    mlstm = [mixer for mixer in model.mixers if isinstance(mixer, MLSTM)]
    f = torch.stack([mixer.bias.unflatten(0, (4, 4, 16))[1] for mixer in slstm])
    torch.testing.assert_close(f.double(), numbers[f"{size}.f"], rtol=1e-6, atol=1e-6)
    std = torch.stack([mixer.down.weight.std() for mixer in mlstm]).double()
    # 22 and 42 layers, not 24 and 48, would start 9 and 14 percent higher
    assert std.mean().item() == pytest.approx(numbers[f"{size}.down_std"].item(), rel=0.01)


@thorough
@pytest.mark.parametrize(
    ("name", "size", "d", "d_rnn", "layers"),
    [
        ("griffin", 100e6, 768, 1024, 12),
        ("griffin-1.3b", 1.3e9, 2048, 2560, 24),
        ("griffin-7b", 7e9, 4096, 5632, 32),
        ("hawk", 100e6, 768, 1024, 12),
        ("hawk-1.3b", 1.3e9, 2048, 2560, 24),
    ],
)
def test_griffins_have_the_sizes_of_their_names(name, size, d, d_rnn, layers):
    config = preset(name)
    # gates in 16 blocks, Lambda, four taps and a bias of each channel
    unit = 2 * (d_rnn * d_rnn // 16 + d_rnn) + d_rnn + 5 * d_rnn
    hawk = 2 * linear(d, d_rnn) + unit + linear(d_rnn, d)
    # one head of 128 channels for keys and values
    attention = 2 * d * d + 2 * d * 128
    mlp = 2 * linear(d, 3 * d) + linear(3 * d, d)
    of_attention = layers // 3 if name.startswith("griffin") else 0
    mixers = (layers - of_attention) * hawk + of_attention * attention
    expected = 32_000 * d + mixers + layers * (mlp + 2 * d) + d
    assert count(config) == expected
    # without the embedding; the smallest has a tenth less
    assert expected - 32_000 * d == pytest.approx(size, rel=0.11)


def test_recurrent_gemma_has_the_size_and_the_configuration_that_are_published():
    ours = preset("recurrent-gemma-2b")
    assert round(count(ours) / 1e9, 2) == 2.68
    transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')
    # what the published configuration has in place of the defaults
    published = {"num_key_value_heads": 1, "intermediate_size": 15360}
    theirs = transformers.RecurrentGemmaConfig(**published).to_dict()
    converted = recurrent_gemma.config(Options(theirs, "config.json"))
    given = {
        name: ours.mixer_args[name].items() <= converted.mixer_args[name].items()
        for name in converted.mixer_args
    }
    assert given == {"hawk": True, "attention": True}
    assert replace(converted, mixer_args=ours.mixer_args) == ours


@pytest.mark.parametrize(
    ("name", "d", "hidden", "layers", "size"),
    [("samba", 1536, 4096, 12, 421e6), ("samba-1.3b", 2304, 6144, 18, 1.33e9)],
)
def test_sambas_have_the_sizes_of_their_names(name, d, hidden, layers, size):
    config = preset(name)
    # both projections; four taps and a bias; dt, B and C of x; dt; rates and skip weights of 16 states
    inner, rank = 2 * d, d // 16
    mamba = 3 * d * inner + 5 * inner + inner * (rank + 32) + linear(rank, inner) + 17 * inner
    mlp = 2 * linear(d, hidden) + linear(hidden, d)
    expected = 32_000 * d + layers // 2 * (mamba + 4 * d * d) + layers * (mlp + 2 * d) + d
    assert count(config) == expected
    assert expected == pytest.approx(size, rel=0.003)
    with torch.device("meta"):
        mamba, attention, *_ = LanguageModel(config).mixers
    assert (mamba.d_inner, attention.window, attention.d_head) == (inner, 2048, 128)


@pytest.mark.parametrize(
    ("name", "d", "layers", "each", "size"),
    [("based", 1024, 27, 5, 360e6), ("based-1.3b", 1792, 36, 7, 1.35e9)],
)
def test_baseds_have_the_layers_and_the_sizes_of_their_names(name, d, layers, each, size):
    config = preset(name)
    conv = linear(d, 4 * d) + 3 * 2 * d + linear(2 * d, d)
    taylor, attention, mlp = 2 * d * 256 + 2 * d * d, 4 * d * d, 3 * d * 2 * d
    mixers = (layers - 2 * each) * conv + each * (taylor + attention)
    expected = 50_264 * d + mixers + layers * (mlp + 2 * d) + d
    assert count(config) == expected == pytest.approx(size, rel=0.01)
    with torch.device("meta"):
        _, taylor, attention, *_ = LanguageModel(config).mixers
    assert (taylor.phi.d_head, taylor.d_head, attention.window) == (16, d // 16, 129)


@thorough
@pytest.mark.parametrize(
    ("name", "d", "layers", "attention"),
    [
        ("h3-hybrid", 768, 12, [1, 8]),
        ("h3-125m", 768, 12, [6]),
        ("h3-355m", 1024, 24, [8, 16]),
        ("h3-1.3b", 2048, 24, [8, 16]),
        ("h3-2.7b", 2560, 32, [8, 16, 24]),
    ],
)
def test_h3s_have_their_layers_of_attention_and_the_size_that_is_published(name, d, layers, attention):
    config = preset(name)
    assert [layer for layer in range(layers) if config.mixer_of(layer)[0] == "attention"] == attention
    # B and C of 64 taps; of 32 pairs A, B and C; D of both, and step sizes
    h3 = 4 * linear(d, d) + 2 * 64 * d + 6 * 32 * d + 3 * d
    mlp = linear(d, 4 * d) + linear(4 * d, d)
    mixers = len(attention) * 4 * linear(d, d) + (layers - len(attention)) * h3
    expected = 50_264 * d + mixers + layers * (mlp + 4 * d) + 2 * d
    assert count(config) == expected
    if name == "h3-125m":
        # which the authors' page prints
        assert expected == 126_387_456
    else:
        sizes = {"hybrid": 125e6, "355m": 355e6, "1.3b": 1.3e9, "2.7b": 2.7e9}
        assert expected == pytest.approx(sizes[name.removeprefix("h3-")], rel=0.025)


@thorough
@pytest.mark.parametrize(
    ("name", "d", "hidden", "layers", "size"),
    [
        ("hyena-125m", 768, 3072, 12, 125e6),
        ("hyena-slim", 768, 1536, 18, 125e6),
        ("hyena-153m", 864, 1728, 18, 153e6),
        ("hyena-355m", 1024, 2048, 36, 355e6),
        ("hyena-1.3b", 2048, 4096, 36, 1.3e9),
    ],
)
def test_hyenas_have_the_sizes_of_the_papers_table(name, d, hidden, layers, size):
    config = preset(name)
    taps = 1024 if name in ("hyena-125m", "hyena-slim") else 2048
    # positions; three layers of sines, which share their frequencies, and one without a bias; D
    network = 33 * taps + linear(33, 64) + 2 * linear(64, 64) + 64 + 64 * d + d
    # three projections with three taps and a bias, and the one behind
    hyena = linear(d, 3 * d) + 4 * 3 * d + network + linear(d, d)
    mlp = linear(d, hidden) + linear(hidden, d)
    expected = 50_264 * d + layers * (hyena + mlp + 4 * d) + 2 * d
    assert count(config) == expected
    assert expected == pytest.approx(size, rel=0.016)


def test_s5_hyena_is_the_released_model():
    d, states = 768, 128
    # A and steps, B and C of two numbers each, D
    system = 3 * states + 4 * states * d + d
    hyena = linear(d, 3 * d) + 4 * 3 * d + system + linear(d, d)
    mlp = linear(d, 4 * d) + linear(4 * d, d)
    assert count(preset("s5-hyena")) == 50_257 * d + 12 * (hyena + mlp + 4 * d) + 2 * d
    with torch.device("meta"):
        mixer = LanguageModel(preset("s5-hyena")).mixers[0]
    assert [s5.entries for s5 in mixer.systems] == [states]


def test_channel_mixing_by_name():
    expected = {"ffn": "gelu", "squared_relu": "squared_relu", "glu": "sigmoid", "swiglu": "silu"}
    expected |= {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "bilinear": "identity"}
    for kind, activation in expected.items():
        block = LanguageModel(ModelConfig(vocab_size=6, d_model=8, n_layers=1, channel_mixing=kind)).blocks[0]
        assert block.channel_mixing.activation == activation
        assert isinstance(block.channel_mixing, FeedForward) == (kind in ("ffn", "squared_relu"))
    with pytest.raises(ValueError, match=r"'swishglu'.*did you mean 'swiglu'"):
        LanguageModel(ModelConfig(vocab_size=6, d_model=8, channel_mixing="swishglu"))


def test_the_transitions_of_every_layer_are_marked():
    model = LanguageModel(preset("memory-horizon"))
    groups = groups_of(model)
    marked = [p for name, p in model.named_parameters() if groups[name].name == "transition"]
    assert sum(p.numel() for p in marked) == 4 * 2 * linear(64, 64)


def test_preset_names_and_errors():
    mixers = [preset(name).mixer_pattern[0] for name in preset_names()]
    counts = {
        "gate_loop": 2,
        "hgru": 5,
        "mlstm": 4,
        "hawk": 6,
        "mamba": 2,
        "base_conv": 2,
        "h3": 5,
        "hyena": 5,
        "s5_hyena": 1,
        "s4": 1,
    }
    assert mixers == [name for name, number in counts.items() for _ in range(number)]
    assert preset("memory_horizon") == preset("memory-horizon")
    with pytest.raises(ValueError, match="'wikitext'; did you mean 'wikitext103'"):
        preset("wikitext")


def test_a_config_survives_json():
    config = preset("wikitext103")
    assert ModelConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 0}, "`vocab_size` must be at least 1; got 0"),
        ({"n_layers": 0}, "`n_layers` must be at least 1; got 0"),
        ({"norm_eps": 0.0}, "`norm_eps` must be above 0; got 0.0"),
        ({"embedding_scale": 0.0}, "`embedding_scale` must be above 0, or None; got 0.0"),
        ({"logit_cap": -1.0}, "`logit_cap` must be above 0, or None; got -1.0"),
        ({"n_outputs": 0}, "`n_outputs` must be at least 1, or None for `vocab_size`; got 0"),
        ({"dropout": 1.0}, "`dropout` must be in [0, 1); got 1.0"),
        ({"n_outputs": 50, "tie_embeddings": True}, "`tie_embeddings` needs as many outputs as tokens"),
    ],
)
def test_errors_of_the_config(arguments, message):
    with pytest.raises(ValueError) as error:
        ModelConfig(**{"vocab_size": 6, **arguments})
    assert message in str(error.value)
