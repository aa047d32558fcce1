from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.models import Block, LanguageModel, ModelConfig
from linrec.models.compilation import compiling
from linrec.nn.channel_mixing import GLU
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

CONFIG = ModelConfig(vocab_size=6, n_outputs=5, d_model=8, n_layers=2, d_channel_mixing=12)


def make(config: ModelConfig = CONFIG) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(config)


def tokens(time: int = 9) -> torch.Tensor:
    return torch.randint(0, 6, (3, time), generator=generator())


def test_the_model_is_figure_9_with_norms_before_the_sublayers():
    model = make()
    x = model.embedding.weight[tokens()]
    for block in model.blocks:
        norm = functional.layer_norm(x, (8,), block.mixer_norm.weight, block.mixer_norm.bias)
        x = x + block.mixer(norm)[0]
        norm = functional.layer_norm(
            x, (8,), block.channel_mixing_norm.weight, block.channel_mixing_norm.bias
        )
        x = x + block.channel_mixing(norm)
    norm = functional.layer_norm(x, (8,), model.norm.weight, model.norm.bias)
    logits, state = model(tokens())
    assert_agree(logits, norm @ model.head.weight.T + model.head.bias)
    assert [part.shape for part in state] == [(3, 8, 1, 1), (3, 8, 1, 1)]


def test_post_norms_stand_after_the_skip_connections():
    block = make(replace(CONFIG, norm_position="post")).blocks[0]
    x = torch.randn(2, 7, 8, generator=generator())
    norms = [(norm.weight, norm.bias) for norm in (block.mixer_norm, block.channel_mixing_norm)]
    expected = functional.layer_norm(x + block.mixer(x)[0], (8,), *norms[0])
    expected = functional.layer_norm(expected + block.channel_mixing(expected), (8,), *norms[1])
    assert_agree(block(x)[0], expected)
    with pytest.raises(ValueError, match="did you mean 'post'"):
        make(replace(CONFIG, norm_position="posst"))


def test_models_without_norms():
    model = make(replace(CONFIG, norm="none"))
    x = model.embedding(tokens())
    for block in model.blocks:
        x = x + block.mixer(x)[0]
        x = x + block.channel_mixing(x)
    assert_agree(model(tokens())[0], model.head(x))
    assert not [name for name, _ in model.named_parameters() if "norm" in name]


def test_output_norms_stand_before_the_skip_connections_of_the_blocks_that_have_them():
    model = make(replace(CONFIG, norm_position=("pre", "output"), channel_mixing_bias=False))
    first, block = model.blocks
    assert first.norm_position == "pre" and block.channel_mixing.up.bias is None
    x = torch.randn(2, 7, 8, generator=generator())
    norms = [(norm.weight, norm.bias) for norm in (block.mixer_norm, block.channel_mixing_norm)]
    expected = x + functional.layer_norm(block.mixer(x)[0], (8,), *norms[0])
    expected = expected + functional.layer_norm(block.channel_mixing(expected), (8,), *norms[1])
    assert_agree(block(x)[0], expected)


@pytest.mark.parametrize("norm_position", ["pre", "post", "output"])
def test_blocks_without_skip_connections_have_no_sums(norm_position):
    block = make(replace(CONFIG, norm_position=norm_position, skip=False)).blocks[0]
    x = torch.randn(2, 7, 8, generator=generator())
    expected = x
    for norm, sublayer in (
        (block.mixer_norm, lambda x: block.mixer(x)[0]),
        (block.channel_mixing_norm, block.channel_mixing),
    ):
        expected = sublayer(norm(expected)) if norm_position == "pre" else norm(sublayer(expected))
    assert_agree(block(x)[0], expected)


def test_a_plain_stack_has_arguments_of_single_layers():
    plain = {"mixer": "unicornn", "channel_mixing": "none", "norm": "none", "skip": False, "n_layers": 2}
    config = replace(
        CONFIG, **plain, mixer_args={"alpha": 0.0, "dt": 1.0}, layer_args={"dt": (2.81e-5, 0.0343)}
    )
    model = make(config)
    assert [(mixer.dt, mixer.alpha) for mixer in model.mixers] == [(2.81e-5, 0.0), (0.0343, 0.0)]
    first, second = model.mixers
    y, _ = second(first(model.embedding(tokens()))[0])
    assert_agree(model(tokens())[0], model.head(y))


@pytest.mark.parametrize("changes", [{"n_layers": 3}, {"mixer": ("unicornn", "lem")}])
def test_arguments_of_layers_are_a_number_for_each(changes):
    given = {"mixer": "unicornn", "n_layers": 2, "layer_args": {"dt": [0.1, 0.2]}} | changes
    with pytest.raises(ValueError, match="`layer_args` must have a number for each of `n_layers`"):
        ModelConfig(vocab_size=5, **given)


def test_blocks_without_channel_mixing_mix_time_alone():
    model = make(replace(CONFIG, channel_mixing="none"))
    x = model.embedding.weight[tokens()]
    for block in model.blocks:
        x = x + block.mixer(functional.layer_norm(x, (8,), *block.mixer_norm.parameters()))[0]
    expected = model.head(functional.layer_norm(x, (8,), *model.norm.parameters()))
    assert_agree(model(tokens())[0], expected)
    assert not any("channel_mixing" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_a_channel_mixing_that_is_a_mixer_carries_its_state(norm_position):
    torch.manual_seed(0)
    block = Block(build("gate_loop", 8), build("hgru", 8), norm_position=norm_position)
    x = torch.randn(2, 9, 8, generator=generator())
    check_split(block, x)
    check_steps(block, x)
    check_reset(block, x)
    state = block.init_state(2)
    assert_agree(block(x, state)[0], block(x)[0])
    assert sum(part[0].numel() for part in state) == block.state_size == 8 + 8


def test_options_of_embedding_and_head():
    options = {"embedding_norm": True, "head_bias": False, "logit_cap": 0.5, "norm": "rms", "norm_eps": 0.1}
    model = make(replace(CONFIG, **options))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits, _ = model(tokens())
    embedded = model.embedding.weight[tokens()]
    expected = embedded / (embedded.square().mean(-1, keepdim=True) + 0.1).sqrt()
    assert_agree(seen[0], expected * model.embedding_norm.weight)
    plain = model.hidden(tokens())[0] @ model.head.weight.T
    assert model.head.bias is None and plain.abs().max() > 0.5
    assert_agree(logits, 0.5 * torch.tanh(2 * plain))
    scaled = make(replace(CONFIG, embedding_scale=0.25))
    scaled.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    scaled(tokens())
    assert_agree(seen[-1], scaled.embedding.weight[tokens()] / 4)
    tied = make(ModelConfig(vocab_size=6, d_model=8, tie_embeddings=True, head_bias=True))
    assert tied.head.bias is not None and tied.head.weight is tied.embedding.weight


class TestLaws:
    @staticmethod
    def on_embeddings(x, state=None, *, reset=None, model=make()):  # noqa: B008
        # the laws change inputs continuously, so they enter behind the embedding
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

    @thorough
    def test_compile(self):
        x = torch.randn(3, 9, 8, generator=generator())
        check_compile(make().blocks[0], x, compiler="aot_eager")


@thorough
def test_the_model_compiles_whole():
    torch.compiler.reset()
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, state = compiled(tokens())
    assert_agree(logits, model(tokens())[0])
    assert_agree(compiled(tokens(1), state)[0], model(tokens(1), state)[0])


@thorough
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_a_compiled_block_of_complex_states_has_its_gradient():
    # inductor writes over what the forward pass saved; the state and the real view of it share their memory
    torch.compiler.reset()
    block = make(replace(CONFIG, n_layers=1, mixer="hgru", d_channel_mixing=9)).blocks[0]
    x = torch.randn(2, 8, 8, generator=generator())

    def gradients(function):
        return torch.autograd.grad(function(x)[0].square().sum(), list(block.parameters()))

    assert_agree(gradients(torch.compile(block, fullgraph=True)), gradients(block))


@pytest.mark.parametrize("channel_mixing", ["glu", "none", "rwkv"])
@pytest.mark.parametrize("recompute", [False, True])
def test_states_that_are_not_kept_are_none(channel_mixing, recompute):
    model = LanguageModel(ModelConfig(5, d_model=8, n_layers=2, channel_mixing=channel_mixing))
    model.recompute = recompute
    tokens = torch.randint(5, (2, 7))
    expected, _ = model.hidden(tokens)
    x, states = model.hidden(tokens, keep_state=False)
    assert torch.equal(x, expected) and states == (None, None)


@thorough
def test_a_compiled_unit_does_not_save_the_product_that_it_can_compute_again():
    unit, x = GLU(8, 24), torch.randn(2, 5, 8, requires_grad=True)
    saved = []
    with compiling(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = torch.compile(unit, backend="aot_eager_decomp_partition")(x)
        y.sum().backward()
    hidden = [tensor for tensor in saved if tensor.shape[-1] == 24 and tensor.numel() == 2 * 5 * 24]
    # the gate and its factor
    assert len(hidden) == 2


@thorough
def test_compiled_training_saves_the_weights_that_it_casts():
    torch.compiler.reset()
    model = LanguageModel(ModelConfig(5, d_model=8, n_layers=1, mixer="min_gru", d_channel_mixing=24))
    model.blocks[0].compile()
    x, saved = torch.randn(2, 5, 8, requires_grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with compiling(), torch.autocast("cpu", torch.bfloat16), hooks:
        y, _ = model.blocks[0](x, keep_state=False)
    y.sum().backward()
    casts = [tensor for tensor in saved if tensor.dtype == torch.bfloat16 and tensor.dim() == 2]
    shapes = {tuple(sorted(tensor.shape)) for tensor in casts}
    assert {(8, 24), (8, 8)} <= shapes


def test_init_state_is_where_none_starts():
    model = make()
    assert_agree(model(tokens(), model.init_state(3))[0], model(tokens())[0])
    assert model.state_size == 2 * 8


def test_tied_embeddings_share_the_weight_and_start_at_unit_scale():
    model = make(replace(CONFIG, n_outputs=None, d_model=256, tie_embeddings=True))
    assert model.head.weight is model.embedding.weight and model.head.bias is None
    assert model.embedding.weight.std().item() == pytest.approx(1 / 16, rel=0.1)
    assert model(tokens())[0].std().item() == pytest.approx(1, rel=0.5)


def test_untied_initialisation_is_torchs_own():
    model = make(replace(CONFIG, vocab_size=500, d_model=64))
    assert model.embedding.weight.std().item() == pytest.approx(1, rel=0.05)
    assert model.head.weight.abs().max() <= 1 / 8


def test_options_of_norm_and_dropout():
    model = make(replace(CONFIG, norm="rms", final_norm=False, dropout=0.5))
    assert isinstance(model.norm, torch.nn.Identity)
    assert isinstance(model.blocks[0].mixer_norm, torch.nn.RMSNorm)
    assert not torch.equal(model(tokens())[0], model(tokens())[0])
    model.eval()
    assert torch.equal(model(tokens())[0], model(tokens())[0])


def test_mixer_arguments_reach_every_block():
    model = make(replace(CONFIG, mixer="gate-loop", mixer_args={"transition": "fixed"}))
    assert [tuple(m.transition(torch.zeros(1, 1, 8))[0].shape) for m in model.mixers] == [(8, 1), (8, 1)]
    assert all(isinstance(block, Block) for block in model.blocks)


def test_unknown_mixers_and_arguments_name_the_nearest_match():
    with pytest.raises(ValueError, match="did you mean 'gate_loop'"):
        make(replace(CONFIG, mixer="gatelop"))
    with pytest.raises(ValueError, match="did you mean 'transition'"):
        make(replace(CONFIG, mixer_args={"transitions": "fixed"}))


def test_input_errors():
    model = make()
    with pytest.raises(ValueError, match=r"`tokens`.*\(batch, time\); got \(9,\)"):
        model(tokens()[0])
    with pytest.raises(TypeError, match=r"`tokens`.*got torch.float32"):
        model(tokens().float())
    with pytest.raises(ValueError, match=r"`state`.*2; got 1"):
        model(tokens(), (None,))


@pytest.mark.parametrize("mixer", ["gate_loop", "hgru"])
def test_recomputation_gives_the_same_gradients(mixer):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=7, d_model=8, n_layers=3, mixer=mixer, dropout=0.2))
    tokens = torch.randint(7, (2, 9))

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        logits, _ = model(tokens)
        return list(torch.autograd.grad(logits.square().mean(), model.parameters()))

    kept = gradients()
    model.recompute = True
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        torch.testing.assert_close(gradients(), kept, rtol=0, atol=0)
    # the inputs of blocks are kept, and not what is inside, which is computed under hooks of its own
    assert sum(x.shape == (2, 9, 8) for x in saved) < 10
