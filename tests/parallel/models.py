"""Cases for mixers and models, whose code knows nothing of ranks."""

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from linrec import mixers
from linrec.models import (
    Bidirectional,
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
)
from linrec.ops import gate_loop_matrix
from linrec.parallel import part, time_parallel
from linrec.testing import reset_mask
from linrec.trees import leaves, map_tree
from tests.mixers import variants

from .compare import check_parts, raises, same, total

D_MODEL = 4
TIME = 11
# mixers that need all steps of a sequence at once, and what the error calls that
REFUSED = {
    "aft": "aft",
    "attention": "softmax_attention",
    "base_conv": "short_conv",
    "block_recurrent": "block_recurrent",
    "block_state": "block_state",
    "comba": "short_conv",
    "compressive_transformer": "compressive_transformer",
    "delta_net": "short_conv",
    "falcon_h1": "softmax_attention",
    "flash_gau": "flash_gau",
    "fnet": "fnet",
    "forgetting_transformer": "softmax_attention",
    "gate_loop_attention": "gate_loop_attention",
    "gated_delta_net": "short_conv",
    "gated_delta_net_2": "short_conv",
    "gated_delta_product": "short_conv",
    "gmlp": "gmlp",
    "h3": "long_conv",
    "hawk": "short_conv",
    "lfm2": "short_conv",
    "ls_lstm": "token_shift",
    "hyena": "short_conv",
    "hippo_rnn": "hippo_rnn",
    "ind_rnn": "ind_rnn",
    "infini_attention": "infini_attention",
    "kda": "short_conv",
    "mamba": "short_conv",
    "mamba2": "short_conv",
    "mamba3": "token_shift",
    "qrnn": "token_shift",
    "strongly_typed_rnn": "token_shift",
    "mega": "mega",
    "mesa_net": "short_conv",
    "preconditioned_delta_net": "short_conv",
    "r_transformer": "r_transformer",
    "recurrent_attention_network": "recurrent_attention_network",
    "recurrent_delta_net": "recurrent_delta_net",
    "recurrent_positions": "nonlinear_scan",
    "rsa": "softmax_attention",
    "delta_delta_net": "delta_rule",
    "delta_lstm": "delta_lstm",
    "srwm": "srwm",
    "linformer": "linformer",
    "liquid_s4": "token_shift",
    "lmu": "dense_ssm",
    "lssl": "dense_ssm",
    "mlstm": "short_conv",
    "reformer": "reformer",
    "rwkv4": "rwkv4",
    "rwkv5": "token_shift",
    "rwkv6": "token_shift",
    "rwkv7": "token_shift",
    "s4": "dplr_ssm",
    "s5_hyena": "short_conv",
    "sgconv": "long_conv",
    "slstm": "slstm",
    "spacetime": "dense_ssm",
    "sru": "sru",
    "synthesizer": "synthesizer",
    "tnn": "long_conv",
    "transformer_ls": "transformer_ls",
    "transformer_xl": "transformer_xl",
    "xlstm_7b": "mlstm",
}
REFUSED |= dict.fromkeys(variants.NONLINEAR, "nonlinear_scan") | {"tarnn": "token_shift"}

REFUSED_VARIANTS = {
    ("linear_attention", variant): "linear_attention with exponential features"
    for variant in ("Performer", "turned Performer", "hyperbolic Performer")
}
REFUSED_VARIANTS |= {
    ("trans_normer", variant): "softmax_attention" for variant in ("blocks", "turned blocks")
}
# with convolutions
REFUSED_VARIANTS |= {
    ("gla", "grouped"): "short_conv",
    ("hgrn2", "grouped"): "short_conv",
    ("hgru", "flash-linear-attention"): "short_conv",
}


def lengths():
    """Parts as `linrec.parallel.part` makes them."""
    size = dist.get_world_size()
    return tuple(len(piece) for piece in torch.arange(TIME).tensor_split(size))


def case_every_mixer():
    # further variants of a mixer call the same operator
    for name, variant in variants.of_operators():
        if name in REFUSED or (name, variant) in REFUSED_VARIANTS:
            continue
        mixer = mixers.build(name, D_MODEL, **variants.arguments(name, variant)).double()

        x = torch.randn(2, TIME, D_MODEL, dtype=torch.float64)
        _, state = mixer(x)
        states = {f"state {i}": tensor.detach() for i, tensor in enumerate(leaves(state))}

        def run(x, reset, mixer=mixer, state=state, names=tuple(states), **given):
            tensors = iter([given.pop(name) for name in names])
            state = map_tree(lambda _: next(tensors), state)
            y, state = torch.func.functional_call(mixer, given, (x, state), {"reset": reset})
            return y, torch.cat([tensor.flatten() for tensor in leaves(state)])

        inputs = {"x": x, **states, **dict(mixer.named_parameters())}
        check_parts(run, inputs, ("x",), lengths(), reset=reset_mask(2, TIME))


def case_what_needs_all_steps_is_refused():
    x = torch.zeros(1, 2, D_MODEL)
    both_ways = Bidirectional(mixers.build("gate_loop", D_MODEL))
    runs = [(words, mixers.build(name, D_MODEL)) for name, words in REFUSED.items()]
    for (name, variant), words in REFUSED_VARIANTS.items():
        runs.append((words, mixers.build(name, D_MODEL, **variants.arguments(name, variant))))
    runs += [("Bidirectional", both_ways), ("gate_loop_matrix", lambda x: gate_loop_matrix(x[None], x[None]))]
    config = SequenceClassifierConfig(n_outputs=2, n_features=D_MODEL, d_model=8)
    runs.append(("SequenceClassifier", SequenceClassifier(config)))
    for name, function in runs:
        with raises(ValueError, f"`{name}` needs all steps of a sequence in one process"), time_parallel():
            function(x)


def model_and_tokens(mixer="gate_loop"):
    model = LanguageModel(ModelConfig(vocab_size=7, d_model=8, n_layers=2, mixer=mixer)).double()
    return model, torch.randint(7, (2, 2 * TIME + 1))


def gradients(model, sum_over_ranks):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {name: total(x) if sum_over_ranks else x for name, x in found.items()}


def loss_of(logits, targets, count):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def case_language_model_in_two_pieces():
    """Each piece is split over ranks, and the state between them has its gradient."""
    for mixer in ("gate_loop", "hgru"):
        model, tokens = model_and_tokens(mixer)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits, state = model(inputs)
        loss = loss_of(logits, targets, targets.numel())
        loss.backward()
        expected = gradients(model, sum_over_ranks=False)

        mine, losses = None, []
        with time_parallel():
            for now, then in zip(inputs.split(TIME, 1), targets.split(TIME, 1), strict=True):
                y, mine = model(part(now), mine)
                losses.append(loss_of(y, part(then), targets.numel()))
        sum(losses).backward()
        same(total(sum(losses).detach()), loss.detach(), "loss")
        for layer, other in zip(mine, state, strict=True):
            same(layer, other, "state")
        for name, gradient in gradients(model, sum_over_ranks=True).items():
            same(gradient, expected[name], f"gradient of {name}")


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
