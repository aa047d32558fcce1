import json
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.attention import Attention
from linrec.mixers.hgru import HGRU
from linrec.mixers.slstm import SLSTM
from linrec.models import (
    ImageClassifier,
    ImageClassifierConfig,
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
)
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_causality,
    check_compile,
    check_reset,
    check_split,
    check_steps,
    generator,
)
from tests.tiers import thorough

# states of one complex tensor, of a cache that grows, and of several parts; and a channel mixing with a state
HYBRID = ModelConfig(
    vocab_size=6,
    d_model=8,
    n_layers=5,
    mixer=("hgru", "attention", "slstm"),
    mixer_args={"attention": {"n_heads": 2, "window": 3}, "slstm": {"recurrent_init": "uniform"}},
    d_channel_mixing=12,
    channel_mixing=("ffn", "rwkv"),
)
ARGUMENTS = {"hgru": {}} | HYBRID.mixer_args


def make(config: ModelConfig = HYBRID) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(config)


def tokens(time: int = 9) -> torch.Tensor:
    return torch.randint(0, 6, (3, time), generator=generator())


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_names_are_repeated_over_depth_each_with_its_arguments():
    model = make()
    kinds = [type(mixer) for mixer in model.mixers]
    assert kinds == [HGRU, Attention, SLSTM, HGRU, Attention]
    assert [mixer.n_heads for mixer in model.mixers if isinstance(mixer, Attention)] == [2, 2]
    mixings = [type(block.channel_mixing).__name__ for block in model.blocks]
    assert mixings == ["FeedForward", "RWKVChannelMixing"] * 2 + ["FeedForward"]


def test_a_hybrid_is_its_layers_one_after_the_other():
    """Each layer, with its weights in a mixer that was built alone."""
    model = make(replace(HYBRID, channel_mixing="none"))
    x, reset = model.embedding(tokens()), torch.zeros(3, 9, dtype=torch.bool)
    reset[1, 4] = True
    expected = x
    for place, block in enumerate(model.blocks):
        name = HYBRID.mixer[place % 3]
        mixer = build(name, 8, **ARGUMENTS[name])
        weights = block.mixer.state_dict()
        if name == "hgru":
            # as the one of two layers of its kind that it is
            HGRU.share([mixer, build(name, 8)] if place == 0 else [build(name, 8), mixer])
        mixer.load_state_dict(weights)
        expected = expected + mixer(block.mixer_norm(expected), reset=reset)[0]
    assert_agree(model(tokens(), reset=reset)[0], model.head(model.norm(expected)))


def test_parameters_and_states_are_those_of_the_layers():
    hybrid = make()
    alone = [build(HYBRID.mixer[place % 3], 8, **ARGUMENTS[HYBRID.mixer[place % 3]]) for place in range(5)]
    ffn, rwkv, norms = 8 * 12 + 12 + 12 * 8 + 8, 8 * 8 + 2 * 8 * 12 + 2 * 8, 2 * 2 * 8
    # two layers of HGRU have the rows of two, though they share them
    assert count(hybrid.blocks) == sum(map(count, alone)) + 3 * ffn + 2 * rwkv + 5 * norms
    sizes = [mixer.state_size for mixer in hybrid.mixers]
    assert sizes == [mixer.state_size for mixer in alone]
    # two of the channel mixings carry one step of the sequence
    assert hybrid.state_size == sum(sizes) + 2 * 8


class TestLaws:
    @staticmethod
    def on_embeddings(x, state=None, *, reset=None, model=make()):  # noqa: B008
        state = state or (None,) * len(model.blocks)
        states = []
        for block, block_state in zip(model.blocks, state, strict=True):
            x, block_state = block(x, block_state, reset=reset)
            states.append(block_state)
        return model.head(model.norm(x)), tuple(states)

    def test_split_steps_causality_batch_and_reset(self):
        x = torch.randn(3, 9, 8, generator=generator())
        for law in (check_split, check_steps, check_causality, check_batch_independence, check_reset):
            law(self.on_embeddings, x)

    def test_of_tokens(self):
        model = make()
        for law in (check_steps, check_batch_independence, check_reset):
            law(model, tokens())
        assert_agree(model(tokens(), model.init_state(3))[0], model(tokens())[0])

    @thorough
    def test_compile(self):
        x = torch.randn(2, 4, 8, generator=generator())
        function = partial(self.on_embeddings, model=make(replace(HYBRID, n_layers=3)))
        # other tests compile each layer alone
        check_compile(function, x, compiler="eager")


def test_layers_of_a_kind_share_among_themselves_and_places_count_all_kinds():
    model = make(replace(HYBRID, n_layers=6, mixer_args={"slstm": {"n_heads": 1}}))
    first, second = (mixer for mixer in model.mixers if isinstance(mixer, HGRU))
    assert first.bounds is second.bounds and (first.layer, second.layer) == (0, 1)
    assert first.bounds.gamma.shape == (2, 8)
    # forget biases as at the same places in a stack of sLSTM alone
    biases = {place: mixer.bias for place, mixer in enumerate(model.mixers) if isinstance(mixer, SLSTM)}
    alone = make(replace(HYBRID, n_layers=6, mixer="slstm", mixer_args={"n_heads": 1})).mixers
    assert_agree([*biases.values()], [alone[place].bias for place in biases])
    assert not torch.equal(*biases.values())


def test_encoders_may_be_hybrids():
    arguments = {"attention": {"causal": False}}
    config = SequenceClassifierConfig(
        n_outputs=2, vocab_size=6, d_model=8, n_layers=3, mixer=("hgru", "attention"), mixer_args=arguments
    )
    model = SequenceClassifier(config)
    # attention that sees later steps needs no second direction
    inner = [
        [type(mixer) for mixer in getattr(block.mixer, "mixers", [block.mixer])] for block in model.blocks
    ]
    assert inner == [[HGRU, HGRU], [Attention], [HGRU, HGRU]]
    ahead, back = (block.mixer.mixers for block in (model.blocks[0], model.blocks[2]))
    assert ahead[0].bounds is back[0].bounds and ahead[1].bounds is back[1].bounds
    assert ahead[0].bounds is not ahead[1].bounds
    lengths = torch.tensor([9, 5, 7])
    padded = tokens().masked_fill(torch.arange(9) >= lengths[:, None], 5)
    assert_agree(model(padded, lengths=lengths)[1:2], model(padded[1:2, :5]))
    images = ImageClassifier(
        ImageClassifierConfig(n_outputs=2, patch_size=4, mixer=("lru", "gla"), n_layers=2)
    )
    names = [type(block.mixer.mixers[0]).__name__ for block in images.blocks]
    assert names == ["LRU", "GLA"]


def test_a_pattern_survives_json_and_one_name_is_that_mixer():
    assert ModelConfig(**json.loads(json.dumps(asdict(HYBRID)))) == HYBRID
    plain = ModelConfig(vocab_size=6, mixer="gla", mixer_args={"n_heads": 2}, channel_mixing="glu")
    alone = ModelConfig(
        vocab_size=6, mixer=("gla",), mixer_args={"gla": {"n_heads": 2}}, channel_mixing=("glu",)
    )
    assert alone == plain
    hyphens = replace(HYBRID, mixer=("gate-loop", "gla"), mixer_args={"gate-loop": {"n_heads": 2}})
    assert hyphens == replace(HYBRID, mixer=("gate_loop", "gla"), mixer_args={"gate_loop": {"n_heads": 2}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": ()}, "`mixer` must be a pattern of 1 to 5 names, since `n_layers` = 5; got 0"),
        ({"mixer": ("gla",) * 5 + ("lru",)}, "`mixer` must be a pattern of 1 to 5 names"),
        ({"channel_mixing": ("ffn",) * 6}, "`channel_mixing` must be a pattern of 1 to 5 names"),
        ({"mixer_args": {"atention": {}}}, "'atention'; did you mean 'attention'?"),
        (
            {"mixer_args": {"n_heads": 2}},
            "of each mixer of ('hgru', 'attention', 'slstm') under its name; got 'n_heads'. "
            "For example, pass {'slstm': {'n_heads': 2}}.",
        ),
    ],
)
def test_errors_of_a_pattern(changes, message):
    with pytest.raises(ValueError) as error:
        replace(HYBRID, **changes)
    assert message in str(error.value)


def test_errors_of_names_and_arguments_in_a_pattern():
    with pytest.raises(TypeError, match=r"`mixer`.*got '3'"):
        replace(HYBRID, mixer=("gla", 3))
    with pytest.raises(ValueError, match="'atention'; did you mean 'attention'"):
        make(replace(HYBRID, mixer=("hgru", "atention"), mixer_args={}))
    with pytest.raises(ValueError, match="'attention' called 'n_head'; did you mean"):
        make(replace(HYBRID, mixer_args={"attention": {"n_head": 2}}))
    with pytest.raises(ValueError, match="'gllu'; did you mean 'glu'"):
        make(replace(HYBRID, channel_mixing=("ffn", "gllu")))
