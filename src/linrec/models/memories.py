"""The memory across a stack that a configuration describes, and the sublayers of blocks that read it."""

from collections.abc import Sequence

from torch import Tensor, nn

from linrec.mixers import Mixer
from linrec.models.config import MemoryConfig, StackConfig
from linrec.models.enhanced_recurrence import EnhancedRecurrence
from linrec.models.memformer import Memformer
from linrec.models.recurrent_memory import RecurrentMemory
from linrec.models.slot_memory import SlotReading
from linrec.models.stack_memory import StackMemory
from linrec.models.temporal_latent_bottleneck import TemporalLatentBottleneck
from linrec.models.token_turing_machine import TokenTuringMachine
from linrec.nn.channel_mixing import FeedForward
from linrec.rules import require

__all__ = ["make_memory", "make_reading"]


def make_reading(
    config: StackConfig, memory: MemoryConfig, layer: int
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the sublayers of block `layer` that read the memory and that mix its channels, if any."""
    d_model = config.d_model
    if memory.kind == "memformer":
        return SlotReading(d_model, memory.n_heads), None
    if memory.kind == "temporal_latent_bottleneck" and layer % memory.read_every == 0:
        hidden, bias = config.d_channel_mixing, config.channel_mixing_bias
        reading = SlotReading(d_model, memory.n_heads, norm="layer")
        return reading, FeedForward(d_model, hidden, bias=bias)
    return None, None


def make_memory(
    config: StackConfig, memory: MemoryConfig, mixers: Sequence[Mixer], weight: Tensor
) -> StackMemory | None:
    """Return the memory across a stack, if any.

    Args:
        config: the stack.
        memory: the memory.
        mixers: the time mixers of the stack, first layer first.
        weight: weight of the layer before the stack, whose deviation memory tokens start with.
    """
    if memory.kind == "none":
        return None
    require(
        not config.reversible,
        f"`reversible` must be False with `memory.kind` = {memory.kind!r}, whose blocks have one stream; got "
        "True. Leave it out.",
    )
    if memory.kind == "enhanced_recurrence":
        return EnhancedRecurrence(memory, mixers)
    _check_form(config, memory, mixers)
    if memory.kind == "memformer":
        return Memformer(memory, config.d_model)
    if memory.kind == "temporal_latent_bottleneck":
        return TemporalLatentBottleneck(memory, config.d_model)
    if memory.kind == "token_turing_machine":
        return TokenTuringMachine(memory, config.d_model)
    return RecurrentMemory(memory, config.d_model, std=weight.detach().std())


def _check_form(config: StackConfig, memory: MemoryConfig, mixers: Sequence[Mixer]) -> None:
    """Raise ValueError unless every mixer fits the form of the memory."""
    causal = memory.form == "decoder"
    for name, mixer in zip(config.mixer_pattern, mixers, strict=False):
        require(
            mixer.is_causal == causal,
            f"`mixer` must {'' if causal else 'not '}be causal with `memory.form` = "
            f"{memory.form!r}; {name!r} is{' not' if causal else ''}. Use causal mixers in a "
            "decoder, and mixers that see later steps, as attention with `causal=False`, in an encoder.",
        )
