"""A seeded load of clients that ask, leave, are killed, and send what is no request."""

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field

# values that no field takes
WRONG = ("5", [], {}, -1, float("nan"), 10**30, [[1]], True, 1.5, "\ud800")
NUMBERS = ("max_tokens", "n", "logprobs", "seed")


def hostile(draws):
    """Return the bytes of a body that is no request."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3}
    kind = draws.randrange(7)
    if kind == 0:
        value = draws.choice(WRONG)
        body[draws.choice(NUMBERS)] = value
    elif kind == 1:
        body["".join(draws.choices("abc_", k=draws.randrange(4, 40)))] = draws.choice(WRONG)
    elif kind == 2:
        body["prompt"] = draws.choice(
            [None, 7, {}, [], [[]], ["a", 1], [257], [-1], "", ["a", None], [[0.5]]]
        )
    elif kind == 3:
        body["stop"] = draws.choice([5, [5], "", ["a"] * 101, ["x" * 101], {"a": 1}, [None]])
    elif kind == 4:
        whole = json.dumps(body).encode()
        return whole[: draws.randrange(len(whole))]
    elif kind == 5:
        return draws.randbytes(draws.randrange(1, 200))
    else:
        depth = draws.randrange(1, 3000)
        return b"[" * depth + b"]" * draws.randrange(depth)
    return json.dumps(body).encode()


@dataclass
class Load:
    """Clients of a server, each with a request of a list.

    Args:
        port: the port of the server.
        asked: bodies of requests.
        expected: the texts of their answers.
        seed: seed of the clients.

    Attributes:
        ends: how many clients ended in which way.
        faults: sentences about answers that are wrong.
    """

    port: int
    asked: list
    expected: list
    seed: int = 0
    ends: Counter = field(default_factory=Counter)
    faults: list = field(default_factory=list)

    def run(self, clients, *, at_once):
        """Run so many clients."""
        asyncio.run(self._all(clients, at_once))

    async def _all(self, clients, at_once):
        free = asyncio.Semaphore(at_once)

        async def one(number):
            try:
                await asyncio.wait_for(self._client(random.Random(f"{self.seed} {number}")), 120)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.faults.append(f"client {number}: {error!r}")
            finally:
                free.release()

        tasks = set()
        for number in range(clients):
            await free.acquire()
            tasks.add(task := asyncio.create_task(one(number)))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _client(self, draws):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        number, what = draws.randrange(len(self.asked)), draws.random()
        streamed = what >= 0.5
        body = json.dumps(self.asked[number] | {"stream": streamed}).encode()
        if what > 0.95:
            body = hostile(draws)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            if 0.9 < what <= 0.95:
                # a client that dies within its request
                writer.write((head.encode() + body)[: draws.randrange(len(head) + len(body))])
                self.ends["half"] += 1
                return
            writer.write(head.encode() + body)
            if 0.8 < what <= 0.85:
                # killed: the connection is reset
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                await asyncio.sleep(draws.random() / 50)
                self.ends["killed"] += 1
                return
            answer = await reader.readuntil(b"\r\n\r\n")
            status = int(answer.split()[1])
            if 0.7 < what <= 0.8 and status == 200:
                await reader.read(200)
                self.ends["left"] += 1
                return
            self._judge(what, number, status, answer, await reader.read(-1))
        finally:
            writer.close()

    def _judge(self, what, number, status, head, content):
        if what > 0.95:
            if not 400 <= status < 500 or b'"message"' not in content or b"Traceback" in content:
                self.faults.append(f"a hostile body got {status}: {content[:200]!r}")
            self.ends["hostile"] += 1
        elif status == 429:
            self.ends["refused"] += 1
        elif status != 200:
            self.faults.append(f"request {number} got {status}: {content[:200]!r}")
        else:
            text = _streamed(content) if b"chunked" in head else json.loads(content)["choices"][0]["text"]
            if text != self.expected[number]:
                self.faults.append(f"request {number}: {text!r} is not {self.expected[number]!r}")
            self.ends["finished"] += 1


def _streamed(content):
    """Return the text of server-sent events in chunks."""
    whole = b""
    while content:
        size, _, rest = content.partition(b"\r\n")
        whole, content = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    *lines, end = [line for line in whole.decode().split("\n\n") if line]
    assert end == "data: [DONE]", end
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [piece["choices"][0]["finish_reason"] is not None for piece in pieces].count(True) == 1
    return "".join(piece["choices"][0]["text"] for piece in pieces)
