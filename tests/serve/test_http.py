"""The server, asked by OpenAI's own client and by clients that send anything."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch

from linrec.serve import Engine
from linrec.serve.http import Limits
from tests.serve.server import all_of, client_of, connected, post, raw_body, serving, text_of, tiny, until
from tests.tiers import thorough

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.fixture(scope="module")
def served():
    with serving(chat_template=TEMPLATE) as (url, engine), client_of(url) as client:
        yield url, engine, client


def test_completions_are_those_of_generate(served):
    _, engine, client = served
    assert [model.id for model in client.models.list()] == ["tiny"]
    found = client.completions.create(model="tiny", prompt="To be", max_tokens=12, seed=3, n=2)
    # further answers have the seeds after it
    expected = [text_of(engine.model, "To be", 12, seed=seed) for seed in (3, 4)]
    assert [choice.text for choice in found.choices] == expected
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 24)
    greedy = client.completions.create(model="tiny", prompt=[[84, 111], [66]], max_tokens=5, temperature=0)
    assert [choice.text for choice in greedy.choices] == [
        text_of(engine.model, prompt, 5, temperature=0) for prompt in ("To", "B")
    ]
    again = client.completions.create(model="tiny", prompt="To be", max_tokens=12, seed=3)
    assert again.choices[0].text == expected[0] and again.usage.prompt_tokens_details.cached_tokens == 4


def test_streams_are_the_completions_in_pieces(served):
    _, _engine, client = served
    options = {"model": "tiny", "prompt": "or not", "max_tokens": 30, "seed": 1, "n": 2}
    whole = client.completions.create(**options)
    pieces = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len(pieces) > 10 and pieces[-1].usage.completion_tokens == 60
    for index in range(2):
        mine = [c for piece in pieces for c in piece.choices if c.index == index]
        assert "".join(choice.text for choice in mine) == whole.choices[index].text
        assert [choice.finish_reason for choice in mine][-1] == "length"
        assert not any(choice.finish_reason for choice in mine[:-1])


def test_stop_strings_end_a_text_wherever_tokens_end(served):
    _, engine, client = served
    text = text_of(engine.model, "that is", 40, seed=5)
    echoed = client.completions.create(
        model="tiny", prompt="that is", max_tokens=40, seed=5, stop=["is", text[10]], echo=True
    )
    assert echoed.choices[0].text == "that is" + text.split(text[10])[0].split("is")[0]
    for stop in (text[3:6], text[10], text[-1], "\x01\x02"):
        options = {"model": "tiny", "prompt": "that is", "max_tokens": 40, "seed": 5, "stop": [stop, "\x01"]}
        expected = text.split(stop)[0]
        found = client.completions.create(**options)
        whole = found.choices[0]
        # tokens behind the stop do not count
        assert found.usage.completion_tokens == min(40, len(expected) + len(stop))
        assert (whole.text, whole.finish_reason) == (expected, "stop" if stop in text else "length")
        streamed = [piece.choices[0].text for piece in client.completions.create(**options, stream=True)]
        assert "".join(streamed) == expected


def test_a_chat_is_its_template(served):
    _, engine, client = served
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = "system: Be brief.\nuser: Hi\nassistant: "
    options = {"model": "tiny", "messages": said, "seed": 2, "max_completion_tokens": 9}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == text_of(engine.model, prompt, 9, seed=2)
    pieces = list(client.chat.completions.create(**options, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    streamed = "".join(piece.choices[0].delta.content for piece in pieces)
    assert streamed == answer.choices[0].message.content
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    said[1]["content"] = parts
    assert client.chat.completions.create(**options).choices[0].message.content == streamed
    # the next turn begins where this one ended
    said += [{"role": "assistant", "content": streamed}, {"role": "user", "content": "And?"}]
    turn = client.chat.completions.create(**options)
    assert turn.usage.prompt_tokens_details.cached_tokens >= len(prompt) + 8


def test_penalties_and_biases_change_the_logits(served):
    _, _engine, client = served
    options = {"model": "tiny", "prompt": "a", "max_tokens": 20, "temperature": 0}
    forced = client.completions.create(**options, logit_bias={"65": 100.0}).choices[0].text
    assert forced == "A" * 20
    plain = client.completions.create(**options).choices[0].text
    varied = client.completions.create(**options, frequency_penalty=2.0, presence_penalty=2.0).choices[0].text
    assert len({*varied}) > len({*plain})


def test_log_probabilities_are_those_of_the_model(served):
    _, engine, client = served
    options = {"model": "tiny", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    # read before, so that its state is kept
    client.completions.create(model="tiny", prompt="who is there", max_tokens=1)
    found = client.completions.create(**options, prompt="who is there", echo=True).choices[0]
    tokens = torch.tensor([list(found.text.encode())])
    expected = engine.model(tokens)[0].log_softmax(-1)[0]
    assert found.text.startswith("who is there") and len(found.logprobs.tokens) == 15
    assert found.logprobs.token_logprobs[0] is found.logprobs.top_logprobs[0] is None
    for place in range(1, 15):
        assert found.logprobs.token_logprobs[place] == pytest.approx(
            expected[place - 1, tokens[0, place]].item()
        )
        assert found.logprobs.top_logprobs[place] == pytest.approx(
            {chr(token): value.item() for value, token in zip(*expected[place - 1].topk(2), strict=True)}
        )
    assert found.logprobs.text_offset == list(range(15))
    new = client.completions.create(**options, prompt="who is there").choices[0]
    assert new.logprobs.token_logprobs == pytest.approx(found.logprobs.token_logprobs[12:])


@thorough
def test_the_harness_asks_for_likelihoods_and_texts(served):
    """lm-eval's local-completions, with requests as texts and as tokens."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    instances = pytest.importorskip("lm_eval.api.instance")
    url, engine, _ = served
    harness = completions.LocalCompletionsAPI(
        model="tiny",
        base_url=f"{url}/v1/completions",
        tokenizer_backend=None,
        tokenized_requests=False,
        max_gen_toks=8,
    )
    asked = instances.Instance("generate_until", {}, ("To be", {"until": ["\x01"]}), 0)
    assert harness.generate_until([asked], disable_tqdm=True) == [
        text_of(engine.model, "To be", 8, temperature=0)
    ]
    prompt = list(b"To be")
    status, found = post(url, harness._create_payload([prompt + list(b" or")]))
    ((likelihood, is_greedy),) = harness.parse_logprobs(found, ctxlens=[5])
    logits = engine.model(torch.tensor([prompt + list(b" or")]))[0].log_softmax(-1)[0]
    expected = sum(logits[4 + n, token].item() for n, token in enumerate(b" or"))
    assert status == 200 and likelihood == pytest.approx(expected) and not is_greedy


HOSTILE = {
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b'{"model": "\xff"}', ""),
    "a number": (b"7", "must be a JSON object"),
    "nothing": (b"", ""),
    "deep": (b"[" * 100_000, ""),
    "no prompt": ({"model": "tiny"}, "`prompt` is missing"),
    "an empty prompt": ({"prompt": ""}, "at least one token"),
    "no prompts": ({"prompt": []}, ""),
    "tokens out of range": ({"prompt": [1, 999]}, "must be in 0 .. 256; got 999"),
    "negative tokens": ({"prompt": [-1]}, "got -1"),
    "half a character": ({"prompt": "\ud800"}, "cannot be encoded"),
    "too many tokens": ({"prompt": "a", "max_tokens": 10**9}, "`max_length`"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "`max_tokens` is wrong"),
    "a text for a number": ({"prompt": "a", "max_tokens": "5"}, "`max_tokens` is wrong"),
    "no number": ({"prompt": "a", "temperature": float("nan")}, "temperature"),
    "cold": ({"prompt": "a", "temperature": -1}, "`temperature` is wrong"),
    "too many answers": ({"prompt": "a", "n": 10_000}, "1 to 16; got 10000"),
    "too many prompts": ({"prompt": ["a"] * 17}, "got 17"),
    "many stops": ({"prompt": "a", "stop": ["x"] * 9}, "`stop` must have at most 8"),
    "very many stops": ({"prompt": "a", "stop": ["x"] * 900}, "`stop` must have at most 100"),
    "nothing but faults": ({"prompt": [{}] * 30_000}, "`prompt` must be a text"),
    "faults of bias": ({"prompt": "a", "logit_bias": {str(n): "x" for n in range(9000)}}, "at most 300"),
    "bias beyond": ({"prompt": "a", "logit_bias": {"999": 1.0}}, "token ids in 0 .. 256"),
    "bias twice": ({"prompt": "a", "logit_bias": {"1": 1.0, "01": 1.0}}, "each once"),
    "options of no stream": ({"prompt": "a", "stream_options": {"include_usage": True}}, "needs `stream`"),
    "an empty stop": ({"prompt": "a", "stop": ""}, "`stop`"),
    "bias of no token": ({"prompt": "a", "logit_bias": {"x": 1.0}}, ""),
    "tools": ({"prompt": "a", "tools": []}, "`tools` is not supported"),
    "many logprobs": ({"prompt": "a", "logprobs": 6}, "`logprobs` is wrong"),
    "streamed logprobs": ({"prompt": "a", "logprobs": 1, "stream": True}, "not supported with `stream`"),
    "a chain": ({"prompt": "a", "best_of": 5}, "`best_of` is not supported"),
    "JSON mode": ({"prompt": "a", "response_format": {"type": "json_object"}}, "`response_format` is not"),
    "a large body": ({"prompt": "a" * 300_000}, "300,000"),
}


def test_hostile_bodies_get_an_error_of_one_sentence_and_harm_nobody():
    with serving(limits=Limits(body=200_000)) as (url, engine):
        for what, (body, expected) in HOSTILE.items():
            if isinstance(body, dict):
                body = {"model": "tiny"} | body
            status, found = post(url, body)
            assert status == (413 if what == "a large body" else 400), (what, status, found)
            message = found["error"]["message"]
            assert found["error"]["type"] == "invalid_request_error"
            assert (expected in message or what == "a large body") and "Traceback" not in message, what
            assert "\n" not in message, (what, message)
        for messages, expected in [
            ([], "`messages` is wrong"),
            ([{}] * 20_000, "at most 10000"),
            ([{"role": "user"}], "`messages[0].content` is missing"),
            (
                [{"role": "user", "content": "a", "tool_calls": []}],
                "`messages[0]`: `tool_calls` is not supported",
            ),
        ]:
            status, found = post(url, {"model": "tiny", "messages": messages}, "/v1/chat/completions")
            assert status == 400 and expected in found["error"]["message"], found
        status, found = post(url, {"model": "other", "prompt": "a"})
        assert status == 404 and "'tiny'" in found["error"]["message"]
        said = [{"role": "user", "content": "Hi"}]
        status, found = post(url, {"model": "tiny", "messages": said}, "/v1/chat/completions")
        assert status == 400 and "no chat template" in found["error"]["message"]
        # a body without a length, in pieces
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            raw.sendall(head.encode())
            for _ in range(4):
                raw.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            assert b" 413 " in raw.recv(1000)
        assert post(url, {"model": "tiny", "prompt": "a", "max_tokens": 3})[0] == 200
        assert not any(engine.open_requests.values())


def test_a_client_that_leaves_frees_its_slots():
    with serving(Engine(tiny(), slots=4, max_length=10**6)) as (url, engine):
        host, port = url.removeprefix("http://").split(":")
        for streamed in (True, False):
            body = json.dumps(
                {"model": "tiny", "prompt": "a", "max_tokens": 900_000, "n": 2, "stream": streamed}
            )
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            with socket.create_connection((host, int(port)), timeout=30) as raw:
                raw.sendall((head + body).encode())
                until(lambda: engine.open_requests["running"] == 2)
            until(lambda: not any(engine.open_requests.values()))
        assert engine.counts["cancelled"] == 4


def test_clients_that_send_or_read_slowly_are_cut_and_slow_no_other():
    engine = Engine(tiny(), slots=8, max_length=10**6)
    with (
        serving(engine, patience=1.0, limits=Limits(patience=1.0)) as (url, engine),
        contextlib.ExitStack() as stack,
    ):
        raw = {what: stack.enter_context(connected(url, unread=4096)) for what in ("head", "body", "reader")}
        silent, second = (stack.enter_context(connected(url)) for _ in range(2))
        begun = time.monotonic()
        raw["reader"].sendall(raw_body(max_tokens=900_000, stream=True))
        # headers, again after an answer, and a body, a byte at a time
        second.sendall(raw_body(max_tokens=1))
        assert b"200 OK" in second.recv(4096)
        request, ended = raw_body(max_tokens=1), {}
        slow = {"head": request[:20], "body": request[:-5], "second": request[:20]}
        for what, sock in (raw | {"second": second}).items():
            sock.sendall(slow.get(what, b""))
        threads = [
            threading.Thread(
                target=lambda w, s: ended.update({w: (all_of(s), time.monotonic() - begun)}), args=pair
            )
            for pair in [("head", raw["head"]), ("body", raw["body"]), ("silent", silent), ("second", second)]
        ]
        for thread in threads:
            thread.start()
        times = []
        while any(thread.is_alive() for thread in threads) or engine.open_requests["running"]:
            for what in ("head", "second"):
                with contextlib.suppress(OSError):
                    (raw | {"second": second})[what].send(b"x")
            # a byte at a time
            with contextlib.suppress(OSError):
                raw["reader"].recv(1)
            before = time.monotonic()
            status, found = post(url, {"model": "tiny", "prompt": "b", "max_tokens": 5})
            times.append(time.monotonic() - before)
            assert status == 200 and found["usage"]["completion_tokens"] == 5
            assert time.monotonic() - begun < 20, ended
            time.sleep(0.05)
        assert engine.counts["cancelled"] == 1
        assert b" 408 " in ended["body"][0] and b"not whole after 1 seconds" in ended["body"][0]
        assert ended["head"][0] == ended["silent"][0] == b""
        assert all(0.9 < seconds < 6 for _, seconds in ended.values())
        assert sorted(times)[len(times) // 2] < 1


def test_requests_over_what_waits_are_refused_and_none_is_lost():
    with serving(Engine(tiny(), slots=2, max_waiting=3)) as (url, _engine):
        found = []

        def ask():
            found.append(post(url, {"model": "tiny", "prompt": "a", "max_tokens": 150})[0])

        threads = [threading.Thread(target=ask) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {*found} == {200, 429} and len(found) == 30 and found.count(200) >= 5


def test_keys_are_asked_for_and_share_no_prefixes():
    with serving(keys=["one", "two"]) as (url, _engine):
        body = {"model": "tiny", "prompt": "Who is there, and who asks?", "max_tokens": 2}
        for key in ("", "Bearer three", "one"):
            assert post(url, body, authorization=key)[0] == (200 if key == "one" else 401)
        cached = []
        for key in ("two", "two", "one"):
            _, found = post(url, body, authorization=f"Bearer {key}")
            cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 and cached[1] > 20 and cached[2] > 20


def test_health_and_counters_tell_no_text(served):
    url, engine, client = served
    client.completions.create(model="tiny", prompt="secret words", max_tokens=3)
    with urllib.request.urlopen(f"{url}/health") as found:
        assert found.status == 200
    with urllib.request.urlopen(f"{url}/metrics") as found:
        text = found.read().decode()
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counts['linrec_tokens_total{kind="generated"}']) == engine.counts["generated"]
    assert float(counts['linrec_requests_total{reason="length"}']) == engine.counts["length"]
    assert float(counts["linrec_first_token_seconds_count"]) > 0
    assert "secret" not in text


def test_a_failed_engine_answers_500_then_503():
    with serving() as (url, engine):
        engine.model.hidden = None
        assert post(url, {"model": "tiny", "prompt": "a prompt to read"})[0] == 500
        assert post(url, {"model": "tiny", "prompt": "a"})[0] == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health")
