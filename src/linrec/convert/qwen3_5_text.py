"""Dense text models of Qwen3.5, as in `Qwen3_5ForCausalLM` of transformers.

They are as Qwen3-Next, with separate projections. Sections of rotary positions do not matter for text, whose
positions are equal in all sections. If the text model was loaded from a `qwen3_5` checkpoint of images and
text, transformers saves tensors under `model.language_model` instead of `model`.
"""

from collections.abc import Iterator
from typing import Any

from linrec.convert.checkpoint import Options
from linrec.convert.layers import linear
from linrec.convert.layout import Part, Piece, rows
from linrec.convert.qwen3_next import blocks
from linrec.convert.qwen3_next import text_config as config
from linrec.models import ModelConfig

__all__ = ["config", "layout"]


def layout(options: Options, config: ModelConfig) -> Iterator[Piece]:
    """Yield the pieces of the checkpoint."""
    for piece in blocks(config, _projections):
        (name,) = piece.theirs
        yield piece._replace(older=[name.replace("model.", "model.language_model.", 1)])


def _projections(d_model: int, *, n_heads: int, d_qk: int, d_v: int, **_: Any) -> Iterator[Piece]:
    """Yield the pieces of the input projections."""
    parts = [Part("q.weight", d_qk), Part("k.weight", d_qk), Part("v.weight", d_v)]
    yield rows("in_proj_qkv.weight", parts, d_model)
    yield from linear("in_proj_z", "gate", d_v, d_model)
    yield from linear("in_proj_b", "beta.projection", n_heads, d_model)
    yield from linear("in_proj_a", "alpha", n_heads, d_model)
