"""The step of generation: run eagerly, compiled, or replayed as a CUDA graph."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.generation.buffers import StateBuffers
from linrec.generation.caches import CacheRings
from linrec.generation.noise import Noise
from linrec.generation.precision import autocast
from linrec.generation.sampling import Sampling, candidates, draw
from linrec.generation.state import GenerationState, filled, named
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.compilation import EAGER_STEPS, compiling, with_parts_compiled
from linrec.models.ragged import RaggedState
from linrec.ops.core.garbage import uncollected
from linrec.ops.core.kernel import successors

# products with a single row are sums of products, which the compiler fuses with each other and with what
# follows; they read weights at the memory's rate only after tuning
SINGLE = {"coordinate_descent_tuning": True, "combo_kernels": True}


class Buffers(NamedTuple):
    """Memory for the tokens of a step and the state, which graphs read and write."""

    token: Int64[Tensor, "b"]
    layers: tuple[State, ...]


class Steps:
    """token_{n+1} ~ softmax(head(model(token_n, state_n))), updating the state at each step.

    On CUDA, the step is captured as graphs once the shape of the state is constant, and replayed from then
    on: a single launch instead of hundreds. Caches of attention become `CacheRings`, whose shapes are
    constant too. If another state grows, the step is never captured. Captured and eager steps do the same
    computation with the same random numbers.

    Args:
        model: a model in evaluation mode.
        state: the initial state.
        sampling: temperature and filters.
        seed: seed of the random numbers.
        vocab_size: number of token ids to choose from; larger ids are padding of the vocabulary.
        precision: "32-true", or "bf16-mixed" for autocast in bfloat16.
        capture: whether a graph may be captured.
        compile: whether the step is compiled once the shape of the state is constant.
    """

    def __init__(
        self,
        model: LanguageModel,
        state: GenerationState,
        *,
        sampling: Sampling,
        seed: int,
        vocab_size: int,
        precision: Precision,
        capture: bool,
        compile: bool,
    ) -> None:
        self._model, self._sampling, self._vocab_size = model, sampling, vocab_size
        self._compile, self._compiling = compile, compiling if compile else nullcontext
        self._precision = precision
        self._token, self._reset, self._layers = state.token, state.reset, state.layers
        self._buffers = StateBuffers()
        self._settled_model = self._compiled()
        # a distribution over the vocabulary in float64 takes as long as two layers unless it is fused
        self._chosen = torch.compile(_chosen, dynamic=False) if compile else _chosen
        self._device = state.token.device
        self._noise = Noise(seed, len(state.token), start=state.drawn, device=self._device)
        self._capture = capture and self._device.type == "cuda"
        # the caches of ragged rows have no common ring
        ragged = isinstance(state.layers, RaggedState)
        self._rings = CacheRings.of(model) if (self._capture or compile) and not ragged else None
        self._stream = torch.cuda.Stream(self._device) if self._capture else None
        # two graphs take turns: the state of each is where the other one reads it
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Buffers]] = []
        self._replays = 0
        self._settled = 0
        self._finite = False

    @property
    def captured(self) -> bool:
        """Whether steps are now replayed as CUDA graphs."""
        return bool(self._graphs)

    @property
    def state(self) -> GenerationState:
        """The state after the last step; later steps do not modify the returned object."""
        layers, token = self._layers, self._token
        if self.captured:
            layers, token = self._copies(layers), token.clone()
        if self._rings is not None:
            layers = self._rings.without(layers)
        return GenerationState(layers, token, self._reset, self._noise.drawn)

    @torch.no_grad()
    def advance(self) -> Int64[Tensor, "b"]:
        """Take one step; return the token of each sequence."""
        self._noise.advance()
        if self._stream is None:
            self._step()
        else:
            # run on the capture stream, after all work that may still read tensors which the step overwrites
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._step()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._token.clone() if self.captured else self._token

    def _step(self) -> None:
        # after the first step, because only that may begin a document
        rings = self._rings if self._finite else None
        if rings is not None and rings.full:
            self._layers = rings.made(self._layers)
            self._graphs, self._replays, self._settled = [], 0, 0
        if self._capture and not self._graphs and self._settled >= EAGER_STEPS:
            self._record()
        if self._graphs:
            self._replay()
        else:
            self._eager()
        if rings is not None:
            rings.taken += 1

    def _compiled(self) -> LanguageModel:
        if not self._compile:
            return self._model
        tuned = SINGLE if len(self._token) == 1 and self._token.is_cuda else {}
        # all steps have the same shapes, also if models of other shapes were compiled before
        return with_parts_compiled(self._model, options=tuned, dynamic=False)

    def _eager(self) -> None:
        if self._capture and self._settled:
            # the step is compiled and tuned for tensors in the form that the graph will have
            self._make_static()
        before = _shapes(self._layers)
        with self._buffers.following(self._layers):
            logits, layers = self._read(None if self._reset is None else self._reset[:, None])
        if not self._finite:
            _check_finite(logits)
        choose = self._chosen if self._settled else _chosen
        self._token, self._layers = choose(logits, self._sampling, self._noise.column()), layers
        self._reset, self._finite = None, True
        self._settled = self._settled + 1 if _shapes(layers) == before else 0

    def _replay(self) -> None:
        graph, after = self._graphs[self._replays % len(self._graphs)]
        graph.replay()
        self._token, self._layers = after
        self._replays += 1

    def _record(self) -> None:
        self._make_static()
        ahead = Buffers(self._token, self._layers)
        behind = Buffers(ahead.token.clone(), self._copies(ahead.layers))
        pool = torch.cuda.graph_pool_handle()
        graphs = []
        for before, after in ((ahead, behind), (behind, ahead)):
            self._token, self._layers = before
            graphs.append((self._recorded(after, pool), after))
        self._token, self._layers = ahead
        self._graphs = graphs

    def _recorded(self, after: Buffers, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph, pool=pool, stream=self._stream):
            self._step_into(after)
        return graph

    def _step_into(self, after: Buffers) -> None:
        """Take a step from the current buffers into others."""
        kept, before = (named(layers, "layers") for layers in (after.layers, self._layers))
        with successors((tensor, kept[name]) for name, tensor in before.items()):
            logits, layers = self._read()
        places = {tensor.untyped_storage().data_ptr() for tensor in kept.values()}
        # kernels have written some parts of the state where they belong
        new = {
            name: tensor
            for name, tensor in named(layers, "layers").items()
            if not _same_place(tensor, kept[name])
        }
        for name, tensor in new.items():
            # a part that is in another part's place must be read before the copies below overwrite it
            if tensor.untyped_storage().data_ptr() in places:
                new[name] = tensor.clone()
        after.token.copy_(self._chosen(logits, self._sampling, self._noise.column()))
        for name, tensor in new.items():
            kept[name].copy_(tensor)

    def _make_static(self) -> None:
        """Have buffers that graphs can read and write: copies, because parts of a state may share memory."""
        self._token, self._layers = self._token.clone(), self._copies(self._layers)

    def _copies(self, layers: tuple[State, ...]) -> tuple[State, ...]:
        """Return copies of all tensors but those that steps write in place."""
        kept = set() if self._rings is None else self._rings.slots(layers)
        copied = {
            name: tensor if id(tensor) in kept else tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in named(layers, "layers").items()
        }
        copies: tuple[State, ...] = filled(layers, "layers", copied)
        return copies

    def _read(self, reset: Tensor | None = None) -> tuple[Tensor, tuple[State, ...]]:
        # a state that grows would be compiled anew at every step
        model = self._settled_model if self._settled else self._model
        with autocast(self._precision, self._device), self._compiling():
            x, layers = model.hidden(self._token[:, None], self._layers, reset=reset)
            return model.head(x[:, -1])[:, : self._vocab_size], layers


def _chosen(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    found = candidates(logits, sampling)
    return found.ids[:, 0] if sampling.greedy else draw(found, uniform)


def _check_finite(logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        raise ValueError(
            "the model's logits must be finite; got infinite values or NaN. Use a checkpoint from before "
            "the training diverged, or a higher `precision`."
        )


def _same_place(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and (x.shape, x.stride()) == (y.shape, y.stride())


def _shapes(layers: tuple[State, ...]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named(layers, "layers").items()}
