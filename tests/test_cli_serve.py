"""`linrec serve`, as a process of its own."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
import torch

from linrec.cli import main
from linrec.generation import generate
from linrec.hf import from_hugging_face
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.models import ModelConfig
from linrec.text import ByteTokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "text.txt").write_text("a rose is a rose is a rose " * 20)
    task = LanguageModeling(path=folder / "text.txt", length=16, cache=folder / "cache")
    model = ModelConfig(vocab_size=1, d_model=8, n_layers=2, mixer=("hgru", "attention"))
    loop = LoopConfig(steps=2, batch_size=2, device="cpu")
    fit(TrainConfig("roses", task, model, loop=loop), folder / "roses")
    return folder / "roses"


class Served:
    """A running `linrec serve`."""

    def __init__(self, *words):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "linrec", "serve", *map(str, words), "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="one", max_retries=0)
        end = time.monotonic() + 60
        while self.health() != 200:
            assert self.process.poll() is None and time.monotonic() < end, self.process.stdout.read()
            time.sleep(0.05)

    def health(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as found:
                return found.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return None

    def ended(self):
        """Return the exit status, and what it said."""
        with self.client:
            if not self.process.stdout.closed:
                self.said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, self.said


@pytest.fixture
def serve():
    """Start servers, which end with the test."""
    begun = []

    def start(*words):
        begun.append(Served(*words))
        return begun[-1]

    yield start
    for served in begun:
        served.process.kill()
        served.ended()


def test_a_run_answers_with_its_tokens_and_ends_with_its_streams(run, tmp_path, serve):
    (tmp_path / "keys").write_text("one\ntwo\n")
    words = run, "--api-key-file", tmp_path / "keys", "--draft-tokens", 3, "--state-dir", tmp_path / "states"
    served = serve(*words)
    model = load_run(run).model()
    client = served.client
    found = client.completions.create(model="roses", prompt="a rose", max_tokens=20, temperature=0)
    tokens, _ = generate(model, torch.tensor([list(b"a rose")]), n_tokens=20, temperature=0, vocab_size=257)
    assert found.choices[0].text == ByteTokenizer().decode(tokens[0].tolist())
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="three").models.list()
    options = {"model": "roses", "prompt": "is", "seed": 1, "stream": True}
    stream = client.completions.create(**options, max_tokens=1500)
    pieces = [next(iter(stream))]
    reader = threading.Thread(target=lambda: pieces.extend(stream))
    reader.start()
    served.process.send_signal(signal.SIGTERM)
    while served.health() == 200:
        time.sleep(0.01)
    # while the stream goes on, new requests are refused
    if reader.is_alive() and served.health() == 503:
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
            client.completions.create(model="roses", prompt="a", max_tokens=1)
    reader.join(60)
    expected, _ = generate(model, torch.tensor([list(b"is")]), n_tokens=99, seed=1, vocab_size=257)
    status, said = served.ended()
    assert status == 0, said
    text = "".join(piece.choices[0].text for piece in pieces)
    # in float32, rounding decides some token sooner or later
    assert text[:90] == ByteTokenizer().decode(expected[0].tolist())[:90]
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")
    assert said.startswith(f"roses at {served.url}/v1\n") and "snapshots in" in said
    served = serve(*words)
    again = served.client.completions.create(model="roses", prompt="a rose is", max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 5
    served.process.send_signal(signal.SIGTERM)
    assert served.ended()[0] == 0


def open_requests(served):
    """Return the number of requests that wait, read or run."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as found:
        lines = found.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("linrec_open_requests{"))


def test_under_load_a_signal_loses_no_accepted_answer_and_a_kill_no_snapshot(run, tmp_path, serve):
    words = run, "--slots", 16, "--state-dir", tmp_path / "states"
    served = serve(*words)
    found, refused = [], []

    def ask(number):
        body = {"model": "roses", "prompt": "a" * (number + 1), "max_tokens": 600, "seed": number}
        if number % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with urllib.request.urlopen(asking(served, body), timeout=120) as answer:
                found.append(answer.read().decode())
        except (OSError, http.client.HTTPException) as error:
            refused.append(error)

    # as many again wait for a slot
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    while open_requests(served) < 32:
        time.sleep(0.01)
    served.process.send_signal(signal.SIGTERM)
    while served.health() == 200:
        time.sleep(0.01)
    late = {"model": "roses", "prompt": "late", "max_tokens": 5}
    with pytest.raises(OSError, match=r"503|refused"):
        urllib.request.urlopen(asking(served, late), timeout=60)
    for thread in threads:
        thread.join(120)
    assert len(found) == 32 and not refused
    for content in found:
        if content.startswith("data: "):
            *pieces, usage, end = content.strip().split("\n\n")
            assert end == "data: [DONE]"
            last = json.loads(pieces[-1].removeprefix("data: "))
            whole = json.loads(usage.removeprefix("data: ")) | {"choices": last["choices"]}
        else:
            whole = json.loads(content)
        reason = whole["choices"][0]["finish_reason"]
        assert reason == "stop" or whole["usage"]["completion_tokens"] == 600, whole
    status, said = served.ended()
    assert status == 0 and "snapshots in" in said
    # killed while it answers: what the folder had stays whole
    served = serve(*words)
    again = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in again:
        thread.start()
    while open_requests(served) < 4:
        time.sleep(0.01)
    served.process.kill()
    for thread in again:
        thread.join(60)
    served = serve(*words)
    body = {"model": "roses", "prompt": "a" * 32, "max_tokens": 1}
    with urllib.request.urlopen(asking(served, body), timeout=60) as answer:
        assert json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] == 31
    served.process.send_signal(signal.SIGTERM)
    status, said = served.ended()
    assert status == 0 and "left out" not in said


def asking(served, body):
    """Return a request of completions."""
    headers = {"content-type": "application/json"}
    return urllib.request.Request(f"{served.url}/v1/completions", json.dumps(body).encode(), headers)


def test_snapshots_that_cannot_be_written_are_told_in_one_line(run, tmp_path, serve):
    (tmp_path / "file").write_text("no folder")
    served = serve(run, "--state-dir", tmp_path / "file")
    served.process.send_signal(signal.SIGTERM)
    status, said = served.ended()
    assert status == 1 and "could not write snapshots to" in said and "Traceback" not in said


def test_a_published_folder_chats_by_its_template(run, tmp_path, serve):
    folder = tmp_path / "published"
    assert main(["publish", str(run), str(folder)]) == 0
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    served = serve(folder, "--name", "rose")
    said = [{"role": "user", "content": "a rose"}]
    found = served.client.chat.completions.create(
        model="rose", messages=said, max_completion_tokens=9, temperature=0
    )
    prompt = torch.tensor([list(b"a rose|")])
    expected, _ = generate(
        from_hugging_face(folder).eval(), prompt, n_tokens=9, temperature=0, vocab_size=257
    )
    assert found.choices[0].message.content == ByteTokenizer().decode(expected[0].tolist())
    served.process.send_signal(signal.SIGINT)
    assert served.ended()[0] == 0


def test_bad_words_are_refused_in_one_line(run, tmp_path, capsys):
    (tmp_path / "keys").write_text("\n")
    for words, expected in [
        ((tmp_path,), "is not"),
        ((run, "--snapshots", "much"), "--snapshots must be a size such as 512MiB or 2GiB; got 'much'"),
        ((run, "--state-bytes", "-1"), "--state-bytes must be a size such as 512MiB or 2GiB; got '-1'"),
        ((run, "--api-key-file", tmp_path / "none"), "--api-key-file"),
        ((run, "--api-key-file", tmp_path / "keys"), "has no keys"),
        ((run, "--chat-template", tmp_path / "none"), "the chat template"),
        ((run, "--slots", "0"), "`slots` must be at least 1"),
    ]:
        assert main(["serve", *map(str, words)]) == 2, words
        said = capsys.readouterr().err
        assert expected in said and said.count("\n") == 1, said
