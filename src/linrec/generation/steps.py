"""One token after another: the step of generation, as it is or replayed as a CUDA graph."""

import torch
from jaxtyping import Int64
from torch import Tensor

from linrec.generation.noise import Noise
from linrec.generation.precision import autocast
from linrec.generation.sampling import Sampling, candidates, draw
from linrec.generation.state import GenerationState, filled, named
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel

# steps before one is recorded: compilers and tuners do their work in them
EAGER_STEPS = 3


class Steps:
    """token_{n+1} ~ softmax(head(model(token_n, state_n))), and the state goes on.

    On CUDA a step is recorded as a graph as soon as the state has stopped changing its shape, and replayed
    from then on: one launch instead of hundreds. A state that grows, as a cache of all steps does, is never
    recorded. Recorded or not, a step is the same computation on the same random numbers.

    Args:
        model: in evaluation mode.
        state: where to start.
        sampling: how tokens are chosen.
        seed: of the random numbers.
        vocab_size: tokens to choose from, the first so many; the others are padding of the vocabulary.
        precision: autocast in bfloat16, or none.
        capture: False never records a graph.
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
    ) -> None:
        self._model, self._sampling, self._vocab_size = model, sampling, vocab_size
        self._precision = precision
        self._token, self._reset, self._layers = state.token, state.reset, state.layers
        self._device = state.token.device
        self._noise = Noise(seed, len(state.token), start=state.drawn, device=self._device)
        self._capture = capture and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._capture else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._settled = 0
        self._finite = False

    @property
    def captured(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None

    @property
    def state(self) -> GenerationState:
        """Where the steps stand; later ones do not change what was returned."""
        layers, token = self._layers, self._token
        if self.captured:
            layers, token = _copies(layers), token.clone()
        return GenerationState(layers, token, self._reset, self._noise.drawn)

    @torch.no_grad()
    def advance(self) -> Int64[Tensor, "b"]:
        """Take one step; return the token of each sequence."""
        self._noise.advance()
        if self._stream is None:
            self._eager()
        else:
            # on the stream that records, and after whatever still reads what it may overwrite
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                if self._graph is None and self._settled >= EAGER_STEPS:
                    self._graph = self._recorded()
                if self._graph is None:
                    self._eager()
                else:
                    self._graph.replay()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._token.clone() if self.captured else self._token

    def _eager(self) -> None:
        before = _shapes(self._layers)
        logits, layers = self._read(None if self._reset is None else self._reset[:, None])
        if not self._finite:
            _check_finite(logits)
        self._token, self._layers = self._choose(logits), layers
        self._reset, self._finite = None, True
        self._settled = self._settled + 1 if _shapes(layers) == before else 0

    def _recorded(self) -> torch.cuda.CUDAGraph:
        # memory that the graph reads and writes; copies, for a state may hold views of one tensor
        self._token, self._layers = self._token.clone(), _copies(self._layers)
        kept = named(self._layers, "layers")
        places = {tensor.untyped_storage().data_ptr() for tensor in kept.values()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            logits, layers = self._read()
            new = named(layers, "layers")
            for name, tensor in new.items():
                # what only moves within the state must be read before its place is written
                if tensor.untyped_storage().data_ptr() in places:
                    new[name] = tensor.clone()
            self._token.copy_(self._choose(logits))
            for name, tensor in new.items():
                kept[name].copy_(tensor)
        return graph

    def _read(self, reset: Tensor | None = None) -> tuple[Tensor, tuple[State, ...]]:
        with autocast(self._precision, self._device):
            x, layers = self._model.hidden(self._token[:, None], self._layers, reset=reset)
            return self._model.head(x[:, -1])[:, : self._vocab_size], layers

    def _choose(self, logits: Tensor) -> Tensor:
        found = candidates(logits, self._sampling)
        return found.ids[:, 0] if self._sampling.greedy else draw(found, self._noise.column())


def _check_finite(logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        raise ValueError(
            "the model's logits must be finite; some are infinite or no numbers. Take a checkpoint from "
            "before its training diverged, or a higher `precision`."
        )


def _shapes(layers: tuple[State, ...]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named(layers, "layers").items()}


def _copies(layers: tuple[State, ...]) -> tuple[State, ...]:
    copied = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in named(layers, "layers").items()
    }
    copies: tuple[State, ...] = filled(layers, "layers", copied)
    return copies
