"""Connections of clients, which end if a client is too slow or sends too much."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from linrec.serve.bodies import Refused, error_object

__all__ = ["BodyLimit", "Connection", "patient"]

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[Any]]

# bytes that the operating system keeps for a client that does not read
UNREAD = 1 << 17


class Connection(H11Protocol):
    """A connection of uvicorn that is cut if the client is too slow.

    The client must send the headers of a request, and read the bytes of an answer, within `seconds`.

    Attributes:
        seconds: the time.
    """

    seconds = 30.0

    def connection_made(self, transport: Any) -> None:
        """Begin to watch the client."""
        super().connection_made(transport)
        self._lost = False
        if (made := transport.get_extra_info("socket")) is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        # when the client last was not late with headers, and with reading
        self._sent = self._read = self.loop.time()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the watch."""
        self._lost = True
        super().connection_lost(exc)

    def _look(self) -> None:
        if self._lost:
            return
        now = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self._sent = now
        if not self.transport.get_write_buffer_size():
            self._read = now
        if now - min(self._sent, self._read) > self.seconds:
            self.transport.abort()
        else:
            self.loop.call_later(min(1.0, self.seconds / 4), self._look)


def patient(seconds: float) -> type[asyncio.Protocol]:
    """Return the connections that wait so long for a client, as `uvicorn.Config(http=..)` takes them."""
    return type("PatientConnection", (Connection,), {"seconds": seconds})


class BodyLimit:
    """Refuses bodies over a number of bytes, also those without a length, and bodies that come too slowly.

    Args:
        app: the application.
        most: bytes of a body.
        seconds: the time in which a body must come.
    """

    def __init__(self, app: Any, most: int, seconds: float) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with whole bodies."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            body = await asyncio.wait_for(self._body(receive), self.seconds)
        except ClientDisconnect:
            return None
        except asyncio.TimeoutError:
            refused = Refused(408, f"the body was not whole after {self.seconds:g} seconds.")
        except Refused as error:
            refused = error
        else:
            given = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Any:
                return given.pop() if given else await receive()

            return await self.app(scope, again, send)
        content = error_object(refused.status_code, refused.detail)
        answer = JSONResponse(content, refused.status_code, {"connection": "close"})
        return await answer(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.most:
                raise Refused(413, f"the body is larger than {self.most:,} bytes.")
        return bytes(body)
