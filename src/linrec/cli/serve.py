"""`linrec serve RUN_OR_FOLDER`: answer requests of OpenAI's clients over HTTP."""

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvicorn
from jinja2 import TemplateError

from linrec.cli.options import ServeOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors
from linrec.errors import ConfigError
from linrec.files import read_json, reason
from linrec.lab.train import load_run
from linrec.lab.train.fabric import device_of
from linrec.lab.train.run import language_task, tokenizer_of, writing
from linrec.models import LanguageModel
from linrec.serve import Engine, NGramDraft
from linrec.serve.connections import patient
from linrec.serve.http import Limits, make_app
from linrec.serve.snapshot_files import load_snapshots, save_snapshots
from linrec.text import Tokenizer, load_tokenizer

# seconds that connections have when all answers are whole
CLOSING = 3
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
BYTES = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


class _Server(uvicorn.Server):
    """After a signal, refuses new requests and ends with the open ones; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float) -> None:
        super().__init__(config)
        self.engine, self.grace = engine, grace
        self.signalled: float | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Note the signal; it may come within any call, so that nothing else may happen here."""
        if self.signalled is not None:
            self.should_exit = self.force_exit = True
        else:
            self.signalled = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, which uvicorn asks ten times a second."""
        if self.engine.failure is not None:
            self.should_exit = True
        if self.signalled is not None:
            self.engine.drain()
            late = time.monotonic() - self.signalled > self.grace
            if late:
                await asyncio.to_thread(self.engine.stop, grace=0)
            self.should_exit |= late or not any(self.engine.open_requests.values())
        return await super().on_tick(counter)


def run(options: ServeOptions, words: Sequence[str]) -> int:
    """Run `linrec serve`."""
    with one_line_errors():
        return _run(options)


def _run(options: ServeOptions) -> int:
    keys, snapshots = _keys(options), _bytes("--snapshots", options.snapshots)
    state_bytes = None if options.state_bytes is None else _bytes("--state-bytes", options.state_bytes)
    model, tokenizer = _model(options)
    engine = Engine(
        model,
        slots=options.slots,
        snapshots=snapshots,
        max_waiting=options.max_waiting,
        max_length=options.max_length,
        state_bytes=state_bytes,
        vocab_size=tokenizer.vocab_size,
        precision=options.precision,
        draft=NGramDraft(options.draft_tokens) if options.draft_tokens else None,
    )
    if options.state_dir is not None and options.state_dir.is_dir():
        for refused in load_snapshots(engine.prefixes, options.state_dir, model, precision=options.precision):
            say(f"linrec: left out: {refused}", file=sys.stderr)
    name = options.name or options.model.resolve().name
    template, specials = _chat_template(options)
    try:
        app = make_app(
            engine,
            tokenizer,
            name=name,
            chat_template=template,
            specials=specials,
            keys=keys,
            limits=Limits(patience=options.patience),
            grace=0,
        )
    except TemplateError as error:
        raise ConfigError(f"the chat template is wrong: {error}.") from error
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=patient(options.patience),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING,
        timeout_keep_alive=CLOSING,
    )
    server = _Server(config, engine, options.grace)
    say(f"{name} at http://{options.host}:{options.port}/v1")
    server.run()
    engine.stop(grace=0)
    if options.state_dir is not None:
        with writing(f"write snapshots to {options.state_dir}"):
            count = save_snapshots(engine.prefixes, options.state_dir, model, precision=options.precision)
        say(f"{count:,} snapshots in {options.state_dir}")
    if engine.failure is not None:
        raise engine.failure
    return 0


def _model(options: ServeOptions) -> tuple[LanguageModel, Tokenizer]:
    """Return the model and the tokenizer of a run folder, or of a folder that transformers loads."""
    device, folder = device_of(options.device), options.model
    if (folder / "config.json").is_file() and read_json(folder / "config.json").get("model_type") == "linrec":
        from linrec.hf import from_hugging_face

        return from_hugging_face(folder).to(device).eval(), load_tokenizer(folder)
    trained = load_run(folder, trust_code=options.trust_code)
    language_task(trained)
    model: LanguageModel = trained.model(device)
    return model, tokenizer_of(trained)


def _chat_template(options: ServeOptions) -> tuple[str | None, dict[str, str]]:
    """Return the chat template, and the special tokens that it may name, of the folder."""
    path, beside = options.chat_template or options.model / "chat_template.jinja", {}
    try:
        if (options.model / "tokenizer_config.json").is_file():
            beside = read_json(options.model / "tokenizer_config.json")
        found = beside.get("chat_template")
        if options.chat_template is not None or path.is_file():
            found = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {reason(error)}.") from error
    if isinstance(found, list):
        # several templates by name
        found = {each.get("name"): each.get("template") for each in found}.get("default")
    specials = {}
    for name, token in beside.items():
        spelt = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(spelt, str):
            specials[name] = spelt
    return found if isinstance(found, str) else None, specials


def _keys(options: ServeOptions) -> list[str]:
    """Return the keys of a file, one a line."""
    if options.api_key_file is None:
        return []
    try:
        keys = options.api_key_file.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {options.api_key_file}: {reason(error)}.") from error
    if not keys:
        raise ConfigError(f"--api-key-file {options.api_key_file} has no keys. Write one key a line.")
    return keys


def _bytes(option: str, text: str) -> int:
    found = BYTES.fullmatch(text)
    if found is None:
        raise ConfigError(f"{option} must be a size such as 512MiB or 2GiB; got {text!r}.")
    return int(float(found[1]) * UNITS[found[2]])
