"""A server in a thread of the tests, and clients of it."""

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import openai
import torch
import uvicorn

from linrec.generation import generate
from linrec.models import LanguageModel, ModelConfig
from linrec.serve import Engine
from linrec.serve.connections import patient
from linrec.serve.http import make_app
from linrec.text import ByteTokenizer


def tiny():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {"vocab_size": 257, "d_model": 16, "n_layers": 1, "mixer": "gla", "d_channel_mixing": 32}
        model = LanguageModel(ModelConfig(**shape)).double()
        # text of printable characters
        model.head.bias.data[:32] = model.head.bias.data[127:] = -100
    return model.eval()


@contextmanager
def serving(engine=None, *, patience=30.0, **options):
    """Run the application in a thread; yield its address and the engine."""
    engine = engine or Engine(tiny(), slots=8, chunk=16)
    app = make_app(engine, ByteTokenizer(), name="tiny", **options)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", http=patient(patience)))
        # a loop of its own, since sockets of the other tests may still be open in this thread's
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", engine
        finally:
            server.should_exit = True
            thread.join(30)


def client_of(url, key="none"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def post(url, body, path="/v1/completions", **headers):
    """Return the status and the object of an answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=60) as found:
            return found.status, json.load(found)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")


def text_of(model, prompt, n_tokens, **options):
    tokens = torch.tensor([list(prompt.encode())])
    found = generate(model, tokens, n_tokens=n_tokens, vocab_size=257, **options).tokens[0].tolist()
    return ByteTokenizer().decode(found)


def raw_body(**fields):
    """Return the bytes of a request."""
    body = json.dumps({"model": "tiny", "prompt": "a"} | fields)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def connected(url, *, unread=None):
    """Return a connection, to a client that takes so many bytes unread."""
    host, port = url.removeprefix("http://").split(":")
    raw = socket.socket()
    if unread is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, unread)
    raw.settimeout(30)
    raw.connect((host, int(port)))
    return raw


def all_of(raw):
    """Return what comes until the connection ends."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(4096):
            found += piece
    return found


def until(condition, seconds=30):
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
