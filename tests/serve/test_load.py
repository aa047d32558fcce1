"""The server under a load of clients that come, leave, die and send anything."""

import json
import random
import threading
import urllib.request

import pytest
import torch

from linrec.generation import generate
from linrec.serve import Engine
from linrec.serve.snapshot_files import load_snapshots, save_snapshots
from linrec.text import ByteTokenizer
from tests.serve.load import Load, hostile
from tests.serve.server import all_of, connected, post, raw_body, serving, text_of, tiny, until
from tests.tiers import tiered


def requests_of(model, count):
    """Return bodies, and the texts of their answers; prompts share prefixes."""
    draws = random.Random(1)
    asked, expected = [], []
    for seed in range(count):
        prompt = "".join(draws.choices("ab ", k=draws.randrange(1, 60)))
        chosen = draws.choice([{"temperature": 0}, {"top_k": 5}, {"top_p": 0.8}, {}])
        n = draws.randrange(1, 40)
        asked.append({"model": "tiny", "prompt": prompt, "max_tokens": n, "seed": seed} | chosen)
        expected.append(text_of(model, prompt, n, seed=seed, **chosen))
    return asked, expected


# ten thousand clients take a minute
@pytest.mark.parametrize("clients", tiered([400], rare=[10_000]))
def test_every_answer_is_right_and_no_slot_is_lost_whatever_clients_do(clients):
    model = tiny()
    asked, expected = requests_of(model, 60)
    engine = Engine(model, slots=16, chunk=16, max_waiting=24, snapshots=300_000)
    sizes = []
    with serving(engine) as (url, engine):
        load = Load(int(url.rpartition(":")[2]), asked, expected)
        for part in range(10):
            load.seed = part
            load.run(clients // 10, at_once=44)
            sizes.append(_resident())
        until(lambda: not any(engine.open_requests.values()))
        assert not load.faults, load.faults[:3]
        assert load.ends["finished"] > clients // 4
        assert {*load.ends} >= {"finished", "left", "killed", "half", "hostile"}
        assert engine.failure is None and engine.prefixes.nbytes <= 300_000
        assert post(url, asked[0])[1]["choices"][0]["text"] == expected[0]
        with urllib.request.urlopen(f"{url}/metrics") as found:
            lines = found.read().decode().splitlines()
        ended = sum(float(line.split()[-1]) for line in lines if line.startswith("linrec_requests_total"))
        # the request that warms up too
        assert ended >= load.ends["finished"] + load.ends["left"] + 2
    if clients > 1000:
        assert sizes[-1] < 1.05 * sizes[2], sizes


@pytest.mark.parametrize("count", tiered([150], rare=[1000]))
def test_hostile_bodies_get_a_status_of_400_to_499(count):
    with serving() as (url, engine):
        for number in range(count):
            body = hostile(random.Random(number))
            status, found = post(url, body)
            assert 400 <= status < 500 and "Traceback" not in json.dumps(found), (number, body, status)
            assert found["error"]["message"], body
        assert engine.counts["read"] <= 1 and not any(engine.open_requests.values())
        assert post(url, {"model": "tiny", "prompt": "a", "max_tokens": 3})[0] == 200


def test_more_clients_than_fit_get_an_answer_or_429():
    with serving(Engine(tiny(), slots=16, max_waiting=184)) as (url, engine):
        found = []

        def ask():
            found.append(post(url, {"model": "tiny", "prompt": "a", "max_tokens": 30})[0])

        threads = [threading.Thread(target=ask) for _ in range(250)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert {*found} <= {200, 429} and len(found) == 250 and found.count(200) >= 200
        assert engine.counts["length"] == found.count(200) + 1


def test_forty_clients_that_leave_free_all_rows():
    with serving(Engine(tiny(), slots=40, max_length=10**6)) as (url, engine):
        leaving = []
        for number in range(40):
            leaving.append(connected(url))
            leaving[-1].sendall(raw_body(max_tokens=900_000, stream=number % 2 == 0))
        until(lambda: engine.open_requests["running"] == 40)
        for sock in leaving:
            sock.close()
        until(lambda: not any(engine.open_requests.values()))
        assert engine.counts["cancelled"] == 40


def test_events_are_whole_lines_and_whole_characters():
    model = tiny()
    # of the bytes of characters of two bytes alone
    model.head.bias.data[:] = -1000
    model.head.bias.data[0xC3] = model.head.bias.data[0xA4] = 0
    with serving(Engine(model)) as (url, _):
        request = raw_body(max_tokens=40, stream=True, seed=1)
        with connected(url) as sock:
            sock.sendall(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            content = all_of(sock)
        events = [line for line in content.split(b"\r\n") if line.startswith(b"data: ")]
        assert events[-1].strip() == b"data: [DONE]" and content.count(b"[DONE]") == 1
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in events[:-1]]
        prompt = torch.tensor([[97]])
        tokens = generate(model, prompt, n_tokens=40, seed=1, vocab_size=257).tokens[0].tolist()
        assert {*tokens} == {0xC3, 0xA4}
        assert "".join(texts) == ByteTokenizer().decode(tokens)


def test_a_thousand_prompts_do_not_exceed_the_budget_of_snapshots(tmp_path):
    model = tiny()
    engine = Engine(model, slots=8, chunk=4, snapshots=100_000, max_waiting=2000)
    draws = random.Random(0)
    for _ in range(1000):
        engine.submit([draws.randrange(257) for _ in range(draws.randrange(1, 30))], n_tokens=2)
    while engine.step():
        assert engine.prefixes.nbytes <= 100_000
    assert engine.prefixes.nbytes > 90_000
    prompt = list(b"once more, from the start")
    engine.submit(prompt, n_tokens=3).result()
    again = engine.submit(prompt, n_tokens=3)
    assert again.result() and again.cached == len(prompt) - 1
    # and the folder holds what the tree holds
    assert save_snapshots(engine.prefixes, tmp_path, model) == len(engine.prefixes)
    assert not load_snapshots(Engine(model, snapshots=50_000).prefixes, tmp_path, model)


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
