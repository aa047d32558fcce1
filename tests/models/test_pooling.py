"""SaShiMi's pooled stack: blocks at several rates."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from linrec.generation import generate
from linrec.models import LanguageModel, ModelConfig, preset
from linrec.testing import assert_agree, generator
from linrec.trees import leaves
from tests.tiers import thorough

# a mixer with segments, whose boundaries are at its own rate, beside others
MIXERS = {
    "s4d": ("s4d", {"d_state": 4}),
    "attention": ("attention", {}),
    "hybrid": (("gru", "infini_attention"), {"infini_attention": {"segment_length": 2}}),
}
each = pytest.mark.parametrize("name", MIXERS)


def make(name: str = "s4d", **config: Any) -> LanguageModel:
    torch.manual_seed(0)
    mixer, arguments = MIXERS[name]
    sizes: dict[str, Any] = {"vocab_size": 7, "d_model": 4, "n_layers": 6, "d_channel_mixing": 8}
    sizes |= {"mixer": mixer, "mixer_args": arguments, "pool": (2, 3)}
    return LanguageModel(ModelConfig(**sizes | config)).double()


def tokens(time: int) -> Tensor:
    return torch.randint(7, (2, time), generator=generator())


def test_the_equations_of_two_tiers() -> None:
    model, x = make(pool=(3,), n_layers=2, pool_expansion=1), tokens(7)
    (pool,), (lower, upper) = model.pooling.pools, model.blocks
    h = model.embedding(x)
    z = torch.stack([pool.down(h[:, 3 * j : 3 * j + 3].flatten(1)) for j in range(2)], 1)
    w = z + lower(z)[0]
    u = torch.zeros_like(h)
    for j in range(2):
        # the last step of 7 is of the third frame, which is not complete
        u[:, 3 * j + 3 : 3 * j + 6] = pool.up(w[:, j]).unflatten(-1, (3, 4))[:, : 4 - 3 * j]
    assert_agree(model(x)[0], model.head(model.norm(h + u + upper(h + u)[0])))


def test_widths_and_blocks_of_tiers() -> None:
    model = make(d_channel_mixing=12)
    assert [mixer.d_model for mixer in model.mixers] == [16, 16, 8, 8, 4, 4]
    assert [block.channel_mixing.up.out_features for block in model.blocks] == [48, 48, 24, 24, 12, 12]
    assert [(pool.down.in_features, pool.down.out_features) for pool in model.pooling.pools] == [
        (8, 8),
        (24, 16),
    ]


@each
def test_any_pieces_are_the_whole(name: str) -> None:
    model, x = make(name), tokens(17)
    whole, last = model(x)
    for lengths in ([1] * 17, [5, 0, 7, 4, 1]):
        state, parts = model.init_state(2), []
        for piece in x.split(lengths, 1):
            y, state = model(piece, state)
            parts.append(y)
        assert_agree(torch.cat(parts, 1), whole)
        assert_agree(state, last)


def test_lower_rates_run_when_their_steps_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    model, state, lengths = make(), None, [[] for _ in range(3)]
    for tier in range(3):
        mixer, run = model.mixers[2 * tier], model.mixers[2 * tier].forward

        def noted(x: Tensor, *given: Any, run: Any = run, tier: int = tier, **options: Any) -> Any:
            lengths[tier].append(x.shape[1])
            return run(x, *given, **options)

        monkeypatch.setattr(mixer, "forward", noted)
    state = model.init_state(2)
    for token in tokens(12).split(1, 1):
        _, state = model(token, state)
    assert lengths == [[1] * 2, [1] * 6, [1] * 12]


@each
def test_no_step_depends_on_later_ones(name: str) -> None:
    model, x = make(name), tokens(13)
    changed = x.clone()
    changed[:, 6] = (x[:, 6] + 1) % 7
    difference = (model(x)[0] - model(changed)[0]).abs().amax((0, 2))
    assert difference[:6].max() == 0 and difference[6:].min() > 1e-6


@each
@pytest.mark.parametrize("position", [3, 4, 6, 9])
def test_a_document_runs_as_from_its_position_in_the_stream(name: str, position: int) -> None:
    model, stream = make(name), tokens(17)
    reset = torch.zeros(2, 17, dtype=torch.bool)
    reset[1, position] = reset[1, 2] = True
    packed, last = model(stream, reset=reset)
    assert_agree(packed[:1], model(stream[:1])[0])
    alone, end = model(stream[1:, position:], model.init_state(1, position=position))
    assert_agree(packed[1:, position:], alone)
    # the reset is in the unfinished step of a pool
    for cut in range(position + 1, position + 4):
        parts, state = [], None
        for piece, begins in zip(
            stream.split([cut, 17 - cut], 1), reset.split([cut, 17 - cut], 1), strict=True
        ):
            y, state = model(piece, state, reset=begins if begins.any() else None)
            parts.append(y)
        assert_agree(torch.cat(parts, 1), packed)
    assert_agree(model(stream, last)[0][1:], model(stream[1:], end)[0])


def test_nothing_from_before_a_reset_reaches_what_follows() -> None:
    model = make("s4d")
    x = model.embedding(tokens(11)).detach()
    x[0, :5] = torch.nan
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[0, 5] = True
    y, state = model.transformed(x, reset=reset)
    assert y[0, 5:].isfinite().all() and all(part.isfinite().all() for part in leaves(state))


def test_masked_steps_are_left_out() -> None:
    model, x = make(), tokens(9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, [2, 3, 8]] = False
    y, state = model(x, mask=mask)
    alone, end = model(x[1:, mask[1]])
    assert_agree(y[1:, mask[1]], alone)
    assert_agree(model(x, state)[0][1:], model(x[1:], end)[0])


def test_gradients_are_those_of_recomputed_blocks() -> None:
    model, x = make(), tokens(17)
    model(x)[0].square().mean().backward()
    found = [p.grad for p in model.parameters()]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in found)
    model.zero_grad()
    model.recompute = True
    model(x)[0].square().mean().backward()
    assert_agree([p.grad for p in model.parameters()], found)


def test_generated_tokens_are_those_of_whole_prefixes() -> None:
    model = make().eval()
    found, state = generate(model, tokens(4), n_tokens=9, temperature=0)
    x = tokens(4)
    for _ in range(9):
        x = torch.cat([x, model(x)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(found, x[:, -9:])
    assert_agree(model(found[:, -1:], state.layers)[0], model(x)[0][:, -1:])


def test_the_state_has_its_size() -> None:
    model = make()
    state = model.init_state(1, position=5)
    assert sum(part.numel() for part in leaves(state)) == model.state_size


def test_the_preset_has_the_published_size() -> None:
    with torch.device("meta"):
        model = LanguageModel(preset("sashimi"))
    width = torch.tensor([64, 128, 256])
    # steps, C and D of S4, its one A, B and P, its map, two norms, and channel mixing
    blocks = width * (1 + 64 + 1) + 3 * 64 + width * (width + 1) + 4 * width + width * (4 * width + 3)
    pools = 64 * 4 * 128 + 128 + 128 * 4 * 256 + 256 + 128 * 4 * 64 + 4 * 64 + 256 * 4 * 128 + 4 * 128
    count = sum(p.numel() for p in model.parameters())
    assert count == 8 * int(blocks.sum()) + pools + 2 * 256 * 64 + 256 + 2 * 64
    # the authors' README: 4.1M
    assert round(count / 1e6, 1) == 4.1


def test_it_is_the_released_code() -> None:
    """state-spaces/s4; the file's metadata has the commit and the layer."""
    numbers = safetensors.torch.load_file(Path(__file__).parent / "sashimi.safetensors")
    model = make(d_model=3, n_layers=3, mixer_args={"d_state": 64}, d_channel_mixing=6)
    weights = {n.removeprefix("weights."): x for n, x in numbers.items() if n.startswith("weights.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and {*missing} == {"embedding.weight", "head.weight", "head.bias"}
    y, _ = model.transformed(numbers["x"])
    assert (y - numbers["y"]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_layers": 4}, "`n_layers` must be a multiple of 3, the tiers of `pool`"),
        ({"pool": (1,)}, "`pool` must be at least 2"),
        ({"pool_expansion": 0}, "`pool_expansion` must be at least 1"),
        ({"memory": {"kind": "recurrent_memory"}}, "with `memory.kind` = 'recurrent_memory'"),
    ],
)
def test_wrong_arguments_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**config)


def test_calls_that_need_every_step_in_every_block_are_refused() -> None:
    model, x = make(), tokens(4)
    with pytest.raises(ValueError, match=r"need `pool` = \(\)"):
        model(x, dt=torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"need `pool` = \(\)"):
        model.transformed(model.embedding(x), every_layer=True)
    with pytest.raises(ValueError, match="`state` must be a PooledState"):
        model(x, (None,) * 6)


@thorough
def test_compiled_models_agree() -> None:
    # compilations of other models count against a limit
    torch.compiler.reset()
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_agree(compiled(tokens(8))[0], model(tokens(8))[0])
