"""`linrec generate RUN`: continue a text with a language model, printing tokens as they are generated."""

import statistics
import sys
import time
from collections.abc import Sequence

import torch

from linrec.cli.options import GenerateOptions
from linrec.cli.parsing import one_line_errors
from linrec.errors import printable
from linrec.generation import Sampling, TokenStream, load_state, save_state, stream
from linrec.lab.train import ConfigError, load_run
from linrec.lab.train.fabric import device_of
from linrec.lab.train.run import language_task, tokenizer_of, writing
from linrec.text import StreamDecoder, Tokenizer

# tokens of context given to the decoder, because the spelling of a token may depend on the tokens before it
CONTEXT = 8


def run(options: GenerateOptions, words: Sequence[str]) -> int:
    """Run `linrec generate`."""
    with one_line_errors():
        return _run(options)


def _run(options: GenerateOptions) -> int:
    # cheap checks first
    Sampling(options.temperature, options.top_k, options.top_p)
    if options.tokens < 0:
        raise ConfigError(f"--tokens must be at least 0; got {options.tokens}.")
    if options.samples < 1:
        raise ConfigError(f"--samples must be at least 1; got {options.samples}.")
    if options.save_state is not None and options.samples > 1:
        raise ConfigError("--save-state saves the state of a single text; leave --samples out.")
    if options.save_state is not None and not options.save_state.absolute().parent.is_dir():
        raise ConfigError(
            f"--save-state {options.save_state}: there is no folder {options.save_state.parent}."
        )
    device = device_of(options.device)
    trained = load_run(options.run, trust_code=options.trust_code)
    task, tokenizer = language_task(trained), tokenizer_of(trained)
    prompt = _encoded(options, tokenizer)
    if len(prompt) > task.length:
        print(
            f"linrec: the prompt has {len(prompt):,} tokens, more than the {task.length:,} of a training "
            "sequence; all tokens are used.",
            file=sys.stderr,
        )
    model = trained.model(device)
    state = None if options.load_state is None else load_state(options.load_state, model)

    tokens = torch.tensor([prompt], dtype=torch.int64)
    if len(prompt) > 1:
        # the first call compiles or loads kernels, and must not count towards the prompt's tokens per second
        stream(model, tokens[:, :3], precision=options.precision)
    before = prompt[-CONTEXT:] if state is None else [*state.token.tolist(), *prompt][-CONTEXT:]
    prefills: list[float] = []
    seconds: list[float] = []
    for seed in range(options.seed, options.seed + options.samples):
        if options.samples > 1:
            sys.stdout.write(f"--- seed {seed} ---\n")
        begun = time.perf_counter()
        numbers = stream(
            model,
            tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=seed,
            state=state,
            vocab_size=tokenizer.vocab_size,
            precision=options.precision,
            compile=options.compile,
        )
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        prefills.append(time.perf_counter() - begun)
        seconds += _write(numbers, options.tokens, tokenizer, before)
    if options.save_state is not None:
        with writing(f"write {options.save_state}"):
            save_state(options.save_state, numbers.state, model)
    told = [f"prompt: {_tokens(len(prompt))}" + _rate(numbers.prefilled, statistics.median(prefills))]
    # the median, because the first steps also compile and capture the CUDA graph
    told += [
        f"generated: {_tokens(len(seconds))}" + (_rate(1, statistics.median(seconds)) if seconds else "")
    ]
    told += [f"state: {numbers.state.nbytes:,} bytes"]
    print("; ".join(told), file=sys.stderr)
    return 0


def _write(numbers: TokenStream, most: int, tokenizer: Tokenizer, before: list[int]) -> list[float]:
    """Write the text of tokens as they are generated; return the seconds that every token took."""
    # escape control characters only on a terminal; a program that reads the text gets it unchanged
    shown = printable if sys.stdout.isatty() else str
    decoder = StreamDecoder(tokenizer)
    for token in before:
        decoder.feed(token)
    seconds: list[float] = []
    while len(seconds) < most:
        begun = time.perf_counter()
        token = int(next(numbers).item())
        seconds.append(time.perf_counter() - begun)
        if token == tokenizer.end_of_document:
            break
        sys.stdout.write(shown(decoder.feed(token)))
        sys.stdout.flush()
    sys.stdout.write(shown(decoder.finish()) + "\n")
    sys.stdout.flush()
    return seconds


def _encoded(options: GenerateOptions, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the prompt; without a prompt and a state, the end-of-document token."""
    tokens: list[int] = tokenizer.encode(_text(options)).tolist()
    if tokens or options.load_state is not None:
        return tokens
    if tokenizer.end_of_document is None:
        raise ConfigError(
            f"the prompt is empty, and the tokenizer {tokenizer.name!r} has no end-of-document token to "
            "start from. Pass --prompt, --prompt-file or --load-state."
        )
    return [tokenizer.end_of_document]


def _text(options: GenerateOptions) -> str:
    if options.prompt and options.prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other; got both.")
    source = "standard input" if options.prompt == "-" else str(options.prompt_file)
    try:
        if options.prompt_file is not None:
            return options.prompt_file.read_bytes().decode()
        if options.prompt == "-":
            return sys.stdin.buffer.read().decode()
    except OSError as error:
        raise ConfigError(f"the prompt {source} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt {source} is not UTF-8: byte {error.start} is invalid.") from error
    return options.prompt


def _tokens(n: int) -> str:
    return f"{n:,} token" if n == 1 else f"{n:,} tokens"


def _rate(n: int, seconds: float) -> str:
    return f" ({n / seconds:,.0f} tokens/s)" if n else ""
