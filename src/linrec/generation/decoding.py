"""Generation: process prompts in parallel, then generate tokens one at a time."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from linrec.generation.precision import with_weights_cast
from linrec.generation.prefill import prefill
from linrec.generation.prompts import check_range, checked_vocabulary
from linrec.generation.sampling import Sampling
from linrec.generation.state import GenerationState
from linrec.generation.steps import Steps
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.compilation import with_parts_compiled
from linrec.models.ragged import joined, rows_of

__all__ = ["Generated", "TokenStream", "generate", "stream"]


class Generated(NamedTuple):
    """The result of `generate`.

    Attributes:
        tokens: the generated tokens, without the prompt, (b, n_tokens).
        state: the state from which the generation can be continued.
    """

    tokens: Int64[Tensor, "b n"]
    state: GenerationState


class TokenStream(Iterator[Tensor]):
    """An endless iterator over generated tokens, a token per sequence and step; created by `stream`.

    Attributes:
        prefilled: number of tokens per sequence that were processed in parallel: all except the last token,
            which the first step processes.
    """

    def __init__(self, steps: Steps, prefilled: int) -> None:
        self._steps = steps
        self.prefilled = prefilled

    def __next__(self) -> Int64[Tensor, "b"]:
        """Take one step; return the token of each sequence, on the model's device."""
        return self._steps.advance()

    @property
    def state(self) -> GenerationState:
        """The generation state after the tokens so far; later steps do not modify the returned object."""
        return self._steps.state

    @property
    def captured(self) -> bool:
        """Whether steps are now replayed as a CUDA graph."""
        return self._steps.captured


def stream(
    model: LanguageModel,
    tokens: Int[Tensor, "b t"] | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    state: GenerationState | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    vocab_size: int | None = None,
    precision: Precision = "32-true",
    capture: bool = True,
    compile: bool = False,
) -> TokenStream:
    """token_{n+1} ~ softmax(logits(token_1, .., token_n) / temperature), filtered by top-k and top-p.

    `stream` processes the prompt before it returns, in parallel and in chunks of constant size. Each token is
    then a single step from the cached state, so time and memory per token do not depend on the number of
    tokens before, unless the model's state grows.

    The n-th generated token of row i is drawn with the n-th random number of the sequence (seed, i). The
    token does not depend on the other rows, on interruptions of the generation, or on capturing. One
    exception is the room of a cache (see `capture`), which rounds logits differently.

    Args:
        model: a model in evaluation mode whose outputs are logits of tokens.
        tokens: the prompts, (b, t), int64 or int32; with `state`, they follow the tokens of the state. Use
            `pad_prompts` for prompts of several lengths. None requires `state`.
        temperature: 0 is greedy; see `Sampling`, also for `top_k` and `top_p`.
        top_k: maximum number of tokens to choose from; None is all.
        top_p: total probability of the tokens to choose from; None is all.
        seed: seed of the random numbers, in 0 .. 2^64 - 1.
        state: state of an earlier generation to continue; None starts from an empty state.
        reset: (b, t), true where a document begins; tokens before it have no influence, not even on where
            segments begin.
        vocab_size: generate only token ids below this number, for models with a padded vocabulary; None
            allows all.
        precision: "32-true", or "bf16-mixed" for autocast in bfloat16.
        capture: on CUDA, whether to capture the step as a CUDA graph once the state's shape is constant,
            which removes the overhead of kernel launches. Caches of attention get room for at least 512
            steps, and half as many steps again as they have, or as many steps as their window, so that their
            shapes are constant until then.
            Pass False for models that cannot be captured.
        compile: whether to compile the step once the state's shape is constant, and the pieces of long
            prompts if no state grows. The compilation takes seconds, once per process and room of a cache,
            and the same tokens follow up to the rounding of their logits.

    Returns:
        An endless iterator over tokens (b), int64, on the model's device.

    Raises:
        ValueError: the model is in training mode or its outputs are not logits of tokens; `tokens` is empty
            and `state` is None; tokens are out of range; shapes do not match; logits are not finite; or an
            option is out of range.
        TypeError: `tokens` is not an integer tensor.

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1)).eval()
        >>> numbers = stream(model, torch.tensor([[1, 2, 3]]), seed=1)
        >>> next(numbers).shape, numbers.prefilled
        (torch.Size([1]), 2)
    """
    sampling = Sampling(temperature, top_k, top_p)
    vocab_size = checked_vocabulary(model, vocab_size)
    device = next(model.parameters()).device
    tokens, reset, layers = pending(model, tokens, reset, state, device)
    model = with_weights_cast(model, precision)
    last = mask = None
    if reset is not None and model.has_segments:
        layers, mask = _begun(model, layers, reset)
    elif reset is not None:
        reset, last = reset[:, :-1], reset[:, -1]
    compiled = with_parts_compiled(model) if compile else None
    layers = prefill(model, tokens[:, :-1], reset, layers, precision, mask=mask, compiled=compiled)
    drawn = 0 if state is None else state.drawn
    steps = Steps(
        model,
        GenerationState(layers, tokens[:, -1], last, drawn),
        sampling=sampling,
        seed=seed,
        vocab_size=vocab_size,
        precision=precision,
        capture=capture,
        compile=compile,
    )
    return TokenStream(steps, tokens.shape[1] - 1)


def generate(
    model: LanguageModel,
    tokens: Int[Tensor, "b t"] | None = None,
    *,
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    state: GenerationState | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    vocab_size: int | None = None,
    precision: Precision = "32-true",
    capture: bool = True,
    compile: bool = False,
) -> Generated:
    """Return the first `n_tokens` tokens of `stream`, and the state after them.

    Args:
        model: see `stream`, also for arguments not listed here.
        tokens: the prompts, (b, t).
        n_tokens: number of tokens to generate, at least 0.

    Returns:
        Tokens (b, n_tokens), and the state. Another call with this state, without tokens and with the same
        seed, returns the tokens that a single longer call would have returned next.

    Raises:
        ValueError: `n_tokens` is negative, or `stream` raises ValueError.
        TypeError: `stream` raises TypeError.

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1)).eval()
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> whole, _ = generate(model, prompt, n_tokens=6, top_k=3)
        >>> first, state = generate(model, prompt, n_tokens=2, top_k=3)
        >>> rest, _ = generate(model, state=state, n_tokens=4, top_k=3)
        >>> torch.equal(torch.cat([first, rest], dim=1), whole)
        True
    """
    if n_tokens < 0:
        raise ValueError(f"`n_tokens` must be at least 0; got {n_tokens}.")
    numbers = stream(
        model,
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        state=state,
        reset=reset,
        vocab_size=vocab_size,
        precision=precision,
        capture=capture,
        compile=compile,
    )
    found = list(itertools.islice(numbers, n_tokens))
    none = numbers.state.token.new_zeros(len(numbers.state.token), 0)
    return Generated(torch.stack(found, dim=1) if found else none, numbers.state)


def pending(
    model: LanguageModel,
    tokens: Tensor | None,
    reset: Tensor | None,
    state: GenerationState | None,
    device: torch.device,
) -> tuple[Tensor, Tensor | None, tuple[State, ...] | None]:
    """Return the tokens that the model has yet to process, (b, at least 1), their resets, and its state."""
    if tokens is None:
        tokens = torch.zeros(0 if state is None else len(state.token), 0, dtype=torch.int64)
    if tokens.dim() != 2:
        raise ValueError(
            f"`tokens` must have shape (batch, time); got {tuple(tokens.shape)}. "
            "Add a batch axis to a single prompt: `tokens[None]`."
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`tokens` must be int64 token ids; got {tokens.dtype}. Convert: `tokens.long()`.")
    if reset is not None and reset.shape != tokens.shape:
        raise ValueError(
            f"`reset` must have the shape of `tokens`, {tuple(tokens.shape)}; got {tuple(reset.shape)}."
        )
    tokens = tokens.to(device).long()
    reset = None if reset is None else reset.to(device)
    check_range(tokens, model.config.vocab_size)
    if state is None:
        if tokens.shape[1] == 0:
            raise ValueError(
                "`tokens` must hold at least one token per sequence without a `state`; got shape "
                f"{tuple(tokens.shape)}. Start from the end-of-document token, for example."
            )
        return tokens, reset, None
    if len(state.token) != len(tokens):
        raise ValueError(
            f"`state` must have as many sequences as `tokens`, {len(tokens)}; got {len(state.token)}."
        )
    if reset is not None or state.reset is not None:
        begun = torch.zeros_like(state.token, dtype=torch.bool) if state.reset is None else state.reset
        reset = torch.zeros_like(tokens, dtype=torch.bool) if reset is None else reset
        reset = torch.cat([begun[:, None], reset], dim=1)
    return torch.cat([state.token[:, None], tokens], dim=1), reset, state.layers


def _begun(
    model: LanguageModel, layers: tuple[State, ...] | None, reset: Tensor
) -> tuple[tuple[State, ...] | None, Tensor]:
    """Return the state of rows that begin anew at their last reset, and the mask of the prefill.

    A reset would leave the boundaries of segments where the row's first step put them.
    """
    document = reset.cumsum(1)
    mask = document == document[:, -1:]
    if layers is None:
        return None, mask[:, :-1]
    begun, kept = (rows.nonzero()[:, 0] for rows in (reset.any(1), ~reset.any(1)))
    groups = [(begun, model.init_state(len(begun))), (kept, rows_of(layers, kept))]
    return joined((rows, state) for rows, state in groups if len(rows)), mask[:, :-1]
