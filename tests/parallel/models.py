"""Cases for mixers and models, whose code knows nothing of ranks."""

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from linrec import mixers
from linrec.models import (
    Bidirectional,
    LanguageModel,
    MemoryConfig,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
)
from linrec.ops import gate_loop_matrix, softmax_attention
from linrec.parallel import part, time_parallel
from linrec.testing import reset_mask
from linrec.trees import leaves, map_tree
from tests.mixers import variants

from .compare import check_parts, raises, same, total

D_MODEL = 4
TIME = 11
# mixers whose outputs depend on later steps
WHOLE = ("fnet", "linformer")
# steps of each rank, with a part of one step and an empty part
PARTS = {2: [(6, 5)], 3: [(4, 0, 7)], 4: [(1, 6, 0, 4)]}


def lengths():
    """Parts as `linrec.parallel.part` makes them."""
    size = dist.get_world_size()
    return tuple(len(piece) for piece in torch.arange(TIME).tensor_split(size))


def case_every_mixer():
    # further variants of a mixer call the same operator
    for name, variant in variants.of_operators():
        if name in WHOLE:
            continue
        mixer = mixers.build(name, D_MODEL, **variants.arguments(name, variant)).double().eval()
        x = torch.randn(2, TIME, D_MODEL, dtype=torch.float64)
        # three ranks begin without a state
        state = None if dist.get_world_size() == 3 else mixer(x)[1]
        states = {f"state {i}": y.detach() for i, y in enumerate(leaves(state)) if not is_count(y)}

        def run(x, reset, mixer=mixer, state=state, names=tuple(states), **given):
            tensors = iter([given.pop(name) for name in names])
            state = map_tree(lambda y: y if is_count(y) else next(tensors), state)
            y, state = torch.func.functional_call(mixer, given, (x, state), {"reset": reset})
            found = [torch.view_as_real(y) if y.is_complex() else y for y in leaves(state)]
            return y, torch.cat([y.flatten().double() for y in found])

        inputs = {"x": x, **states, **dict(mixer.named_parameters())}
        for parts in PARTS[dist.get_world_size()]:
            check_parts(run, inputs, ("x",), parts, reset=reset_mask(2, TIME))


def is_count(x):
    """Whether a tensor of a state has no gradient."""
    return not (x.is_floating_point() or x.is_complex())


def case_what_needs_all_steps_is_refused():
    x = torch.zeros(1, 2, D_MODEL)
    runs = [(name, mixers.build(name, D_MODEL)) for name in WHOLE]
    runs += [("attention", mixers.build("attention", D_MODEL, causal=False))]
    runs += [("softmax_attention", lambda x: softmax_attention(*[x[:, :, None]] * 3, causal=False))]
    runs += [("Bidirectional", Bidirectional(mixers.build("gate_loop", D_MODEL)))]
    runs += [("gate_loop_matrix", lambda x: gate_loop_matrix(x[None], x[None]))]
    config = SequenceClassifierConfig(n_outputs=2, n_features=D_MODEL, d_model=8)
    runs.append(("SequenceClassifier", SequenceClassifier(config)))
    for name, function in runs:
        with raises(ValueError, f"`{name}` needs all steps of a sequence in one process"), time_parallel():
            function(x)


def model_and_tokens(mixer="gate_loop", **options):
    config = ModelConfig(vocab_size=7, d_model=8, n_layers=2, mixer=mixer, **options)
    return LanguageModel(config).double(), torch.randint(7, (2, 2 * TIME + 1))


def gradients(model, sum_over_ranks):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {name: total(x) if sum_over_ranks else x for name, x in found.items()}


def loss_of(logits, targets, count):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


# the mixers of the presets and of hybrids, and memories across the stack
MODELS = [
    {"mixer": mixer}
    for mixer in (
        *("gate_loop", "hgru", "hyena", "s4", "s5_hyena"),
        *(("hawk", "attention"), ("mamba", "attention"), ("h3", "attention"), ("mlstm", "slstm")),
        *(("base_conv", "linear_attention"), ("gated_delta_net", "attention")),
    )
]
MODELS += [
    {"mixer": "gru", "memory": MemoryConfig(kind=kind, segment_length=4)}
    for kind in ("recurrent_memory", "memformer", "temporal_latent_bottleneck", "token_turing_machine")
]


def case_language_models_in_two_pieces():
    """Each piece is split over ranks, and the state between them has its gradient."""
    for options in MODELS:
        model, tokens = model_and_tokens(**options)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        state, losses = None, []
        for now, then in zip(inputs.split(TIME, 1), targets.split(TIME, 1), strict=True):
            logits, state = model(now, state)
            losses.append(loss_of(logits, then, targets.numel()))
        loss = sum(losses)
        loss.backward()
        expected = gradients(model, sum_over_ranks=False)

        mine, losses = None, []
        with time_parallel():
            for now, then in zip(inputs.split(TIME, 1), targets.split(TIME, 1), strict=True):
                y, mine = model(part(now), mine)
                losses.append(loss_of(y, part(then), targets.numel()))
            sum(losses).backward()
        same(total(sum(losses).detach()), loss.detach(), f"loss of {options}")
        for layer, other in zip(leaves(mine), leaves(state), strict=True):
            same(layer.detach(), other.detach(), f"state of {options}")
        for name, gradient in gradients(model, sum_over_ranks=True).items():
            same(gradient, expected[name], f"gradient of {name} of {options}")


def case_checkpointing():
    model, _ = model_and_tokens()
    x = torch.randn(2, TIME, 8, dtype=torch.float64)

    def run(x):
        for block in model.blocks:
            x, _ = checkpoint(block, x, use_reentrant=False)
        return x.square().sum()

    run(x).backward()
    expected = gradients(model.blocks, sum_over_ranks=False)
    with time_parallel():
        run(part(x)).backward()
    for name, gradient in gradients(model.blocks, sum_over_ranks=True).items():
        same(gradient, expected[name], f"gradient of {name}")
    # outside of the context the steps would be run by themselves
    with time_parallel():
        loss = run(part(x))
    with raises(CheckpointError, "different number of tensors"):
        loss.backward()


def case_compiled():
    mixer = mixers.build("gate_loop", D_MODEL).double()
    compiled = torch.compile(mixer, backend="eager")
    x = torch.randn(2, TIME, D_MODEL, dtype=torch.float64)
    expected, _ = mixer(x)
    for _ in range(2):
        with time_parallel():
            same(compiled(part(x))[0], part(expected), "compiled, in parts")
        same(compiled(x)[0], expected, "compiled, in one process")


def case_autocast():
    model, tokens = model_and_tokens()
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, _ = model(tokens)
        with time_parallel():
            logits, mine = model(part(tokens))
    same(logits, part(expected), "logits")
    assert logits.dtype == torch.bfloat16
    assert all(layer.dtype == torch.complex64 for layer in mine)


def case_two_groups():
    """Ranks 0 and 1 share one sequence, ranks 2 and 3 another."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = groups if dist.get_rank() < 2 else groups[::-1]
    model, tokens = model_and_tokens()
    tokens = (tokens + dist.get_rank() // 2) % 7
    with time_parallel(mine):
        logits, _ = model(part(tokens, group=mine))
    same(logits, part(model(tokens)[0], group=mine), "logits")
    with raises(ValueError, "`group` must contain this process"), time_parallel(other):
        pass
