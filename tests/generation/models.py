"""Small models for these tests, in float64 so that no two tokens are equally likely."""

from typing import Any

import torch

from linrec import mixers
from linrec.models import LanguageModel, ModelConfig
from linrec.nn.segment_mixer import SegmentMixer
from tests.mixers.variants import CAUSAL, OF_FAMILIES, VARIANTS

VOCAB = 13
# every mixer that there is; and states that a default does not have
MIXERS: dict[str, tuple[str | tuple[str, ...], dict[str, Any]]] = {
    # with segments that end within these tests
    name: (name, next(iter(VARIANTS[name].values())) if issubclass(mixers.get(name), SegmentMixer) else {})
    for name in CAUSAL
} | {
    "gate_loop heads": ("gate_loop", {"n_heads": 2, "phase_activation": "none", "output_gate": True}),
    "attention window": ("attention", {"n_heads": 2, "window": 4}),
    "gate_loop_attention heads": ("gate_loop_attention", {"n_heads": 2, "transition": "fixed"}),
    "hybrid": (("hgru", "attention"), {"attention": {"n_heads": 2, "window": 4}}),
    "recurrent_delta_net": ("recurrent_delta_net", {"n_heads": 2, "output_recurrence": True}),
    "delta_lstm": ("delta_lstm", {"n_heads": 2, "version": 3}),
    "relit terms": ("relit", {"n_heads": 2, "r": 4}),
    # whose outputs would be zeros, or near them
    "flash_gau": ("flash_gau", {"chunk_size": 4, "d_qk": 6, "init_std": 0.5}),
    "rwkv4": ("rwkv4", {"zero_init": False}),
    "rwkv5": ("rwkv5", {"zero_init": False}),
    "rwkv6": ("rwkv6", {"zero_init": False}),
}
# of each family, and what is listed above beside the defaults
FIRST = [name for name in MIXERS if name in OF_FAMILIES or name not in mixers.names()]


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **config: Any) -> LanguageModel:
    mixer, arguments = MIXERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"vocab_size": VOCAB, "d_model": 8, "n_layers": 2, "d_channel_mixing": 16} | config
        model = LanguageModel(ModelConfig(mixer=mixer, mixer_args=arguments, **shape))
        # logits far enough apart that generated text is not all the same token, or all noise
        torch.nn.init.normal_(model.head.weight, std=0.7)
    return model.to(dtype).eval()


def prompt(batch: int = 2, length: int = 5, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
