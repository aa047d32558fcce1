"""Layers of linrec that keep their states in vLLM's pool, and keys and values in its pages."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from linrec.mixers import Mixer, State
from linrec.mixers.attention import Attention
from linrec.nn.decays import alibi_slopes
from linrec.nn.norms import gated
from linrec.rules import require
from linrec.vllm import BACKEND, private
from linrec.vllm.metadata import Metadata
from linrec.vllm.rows import ALIGNED, StateRows

__all__ = ["ChannelLayer", "PagedAttention", "RecurrentLayer"]

# vLLM's block that no request owns. It holds the initial state, and padding of CUDA graphs is written there
NO_ONE = 0


class RecurrentLayer(nn.Module, private.MambaBase):
    """A mixer on the tokens of all requests of a step, side by side; each request's state is a row of bytes.

    Requests that decode run as one batch, and pieces of prompts in batches of one length. A request without
    earlier tokens starts from the initial state, because its row may hold the state of an earlier request.

    Decoding reads no values of tensors on the host, so that CUDA graphs can capture it.

    Args:
        mixer: the mixer.
        start: the initial state of one request.
        place: the number of the layer, counted over all layers with a state.
        row: bytes of a row, the same for all layers.
        vllm_config: vLLM's settings.
    """

    def __init__(self, mixer: Mixer, start: State, place: int, row: int, vllm_config: Any) -> None:
        super().__init__()
        self.mixer, self.start, self.row = mixer, start, row
        # vLLM reads the only number in a name as the layer's
        self.prefix = f"layers.{place}"
        self.rows = StateRows(start)
        self.views: list[Tensor] = []
        self.kv_cache: tuple[Tensor, ...] = ()
        vllm_config.compilation_config.static_forward_context[self.prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a row."""
        return ((self.row,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtype of a row."""
        return (torch.uint8,)

    @property
    def mamba_type(self) -> Any:
        """The backend, which knows the rows of a step."""
        return getattr(private.MambaAttentionBackendEnum, BACKEND)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pool of bytes (n, 1, 1, page)."""
        super().bind_kv_cache(kv_cache)
        (pool,) = self.kv_cache
        require(
            pool.stride(0) % ALIGNED == 0,
            f"pages of vLLM's pool must have a multiple of {ALIGNED} bytes; got {pool.stride(0)}.",
        )
        self.views = self.rows.views(pool)

    def forward(self, x: Tensor, state: State = None, *, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Return y (1, n, d_model) of the tokens of a step (1, n, d_model), and no state."""
        of_layers = private.get_forward_context().attn_metadata
        if of_layers is None:
            # vLLM measures memory, and has no pool yet
            return self.mixer(x)[0], None
        metadata: Metadata = of_layers[self.prefix]
        # tokens behind the last request are padding
        y, decoded = torch.zeros_like(x[0]), metadata.num_decode_tokens
        if metadata.num_decodes:
            decode = self._decode if metadata.num_accepted_tokens is None else self._verify
            y[:decoded] = decode(x[0, :decoded], metadata)
        if metadata.num_prefills:
            self._prefill(x[0], metadata, y)
        return y[None], None

    def _states(self, rows: Tensor, is_new: Tensor) -> State:
        """Return the states in some rows, the initial state for requests without earlier tokens."""
        # again each time, because states of padding are written there
        self.rows.write(self.views, rows.new_full((1,), NO_ONE), self.start)
        return self.rows.read(self.views, rows.masked_fill(is_new, NO_ONE))

    def _decode(self, x: Tensor, metadata: Metadata) -> Tensor:
        """Run one token of each request."""
        rows = metadata.state_indices_tensor_d.clamp(min=NO_ONE).long()
        is_new = metadata.seq_lens[: len(rows)] <= 1
        y, state = self.mixer(x[:, None], self._states(rows, is_new))
        self.rows.write(self.views, rows, state)
        return y[:, 0]

    def _verify(self, x: Tensor, metadata: Metadata) -> Tensor:
        """Run the newest token and the drafts of each request, and keep the state after each of them."""
        rows = metadata.state_indices_tensor_d.clamp(min=NO_ONE).long()
        n = len(rows)
        start, tokens = metadata.query_start_loc_d[:n].long(), metadata.query_start_loc_d.diff()
        given = metadata.given.long()
        accepted = rows.gather(1, metadata.num_accepted_tokens[:n, None].long() - 1)[:, 0]
        is_new = metadata.seq_lens[:n] <= tokens
        state = self._states(accepted, is_new)
        # one more token and row: those of requests that have fewer tokens
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        y = torch.zeros_like(x)
        for step in range(rows.shape[1] if metadata.num_decode_tokens > n else 1):
            ended = step >= tokens
            place = (start + step).masked_fill(ended, len(x) - 1)
            found, state = self.mixer(x[place][:, None], state)
            y.index_copy_(0, place, found[:, 0])
            row = rows.gather(1, (step - given[:, None]).clamp(min=0))[:, 0]
            self.rows.write(self.views, row.masked_fill(ended, NO_ONE), state)
        return y[:-1]

    def _prefill(self, x: Tensor, metadata: Metadata, y: Tensor) -> None:
        """Run the pieces of prompts, and write their outputs into `y`."""
        first = metadata.num_decodes
        borders, seen = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        rows = metadata.state_indices_tensor_p.long()
        of_length: dict[int, list[int]] = {}
        for place in range(metadata.num_prefills):
            length = borders[first + place + 1] - borders[first + place]
            of_length.setdefault(length, []).append(place)
        for length, places in of_length.items():
            steps = torch.tensor([range(borders[first + n], borders[first + n] + length) for n in places])
            is_new = torch.tensor([seen[first + n] <= length for n in places], device=x.device)
            steps, some = steps.to(x.device), rows[torch.tensor(places, device=x.device)]
            state = self._states(some, is_new)
            y[steps], state = self.mixer(x[steps], state)
            self.rows.write(self.views, some, state)


class ChannelLayer(RecurrentLayer):
    """Channel mixing with a state, such as RWKV's, as a block calls channel mixing."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return y (1, n, d_model) of the tokens of a step (1, n, d_model)."""
        return super().forward(x)[0]


class PagedAttention(nn.Module):
    """The mixer `attention` on the tokens of all requests of a step; keys and values lie in vLLM's pages.

    Args:
        mixer: the mixer.
        place: the number of the layer, counted over all layers with a state.
        vllm_config: vLLM's settings.

    Attributes:
        positions: (n) int64, the position of each token in its request, to be set before each step.
    """

    def __init__(self, mixer: Attention, place: int, vllm_config: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self.positions: Tensor | None = None
        slopes = alibi_slopes(mixer.n_heads, dtype=torch.float32, device="cpu") if mixer.alibi else None
        self.pages = private.Attention(
            mixer.n_heads,
            mixer.d_head,
            1 / math.sqrt(mixer.d_head),
            num_kv_heads=mixer.kv_heads,
            alibi_slopes=None if slopes is None else slopes.tolist(),
            per_layer_sliding_window=mixer.window,
            cache_config=vllm_config.cache_config,
            prefix=f"layers.{place}.attn",
        )

    def forward(self, x: Tensor, state: State = None, *, reset: Tensor | None = None) -> tuple[Tensor, State]:
        """Return o (1, n, d_model) of the tokens of a step (1, n, d_model), and no state."""
        q, k, v, g = self.mixer.qkv(x)
        if self.mixer.rotary is not None:
            assert self.positions is not None
            q, k = self.mixer.rotary(self.positions[None], q, k)
        heads = self.pages(*(part[0].flatten(1).contiguous() for part in (q, k, v)))
        return self.mixer.out(gated(heads[None], g, torch.sigmoid)), None
