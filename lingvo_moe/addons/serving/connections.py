"""Connections of a server: a bound on their number and on the time that one waits for its client.

aiohttp bounds neither idle connections nor slow clients, and one client could hold all descriptors.
"""

import asyncio
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from lingvo_moe.core.errors import UserError

_MOST = 2000
_RESERVED = 32  # descriptors for files that are opened while the server runs
_CLIENT_SECONDS = 75.0  # more than proxies keep an idle connection: nginx 60
_LINGER_SECONDS = 2.0  # in which the rest of a refused body is read, so that the client sees the answer
_SAY_SECONDS = 60.0


def most_connections() -> int:
  """Number of connections that the limit of open files leaves room for, at most 2000."""
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  free = _MOST if limit == resource.RLIM_INFINITY else limit - len(os.listdir('/dev/fd')) - _RESERVED
  if free < 1:
    raise UserError(f'a limit of {limit} open files leaves none for connections: raise it, as by ulimit -n 1024')
  return min(_MOST, free)


class Connections(web.Server):
  """aiohttp's server, which accepts connections itself, and reads their requests.

  A connection waits for its client while it is idle, in the middle of a request, or sends an answer. One that waits too
  long is closed. Where there are as many as may be, a new one takes the place of the one that has waited longest;
  connections whose requests are being answered stay.

  Args:
    answer: answers a request, whose body may still be on its way.
    malformed: (status, why) -> answer to what is no HTTP request.
    most: number of connections; default: `most_connections`.
    client_seconds: how long one may wait for its client.
  """

  def __init__(
    self,
    answer: Callable[[web.BaseRequest], Awaitable[web.Response]],
    malformed: Callable[[int, str], web.Response],
    *,
    most: int | None = None,
    client_seconds: float = _CLIENT_SECONDS,
  ):
    super().__init__(self._watched, handler_cancellation=True)
    self.malformed = malformed
    self._answer = answer
    self._most = most or most_connections()
    self._seconds = client_seconds
    self._open: dict[web.RequestHandler, asyncio.Transport] = {}
    self._waiting: dict[web.RequestHandler, float] = {}  # since when, longest first
    self._quiet_until = 0.0

  async def accept(self, bound: socket.socket) -> None:
    """Accepts connections until it is cancelled; those that are open then stay."""
    loop = asyncio.get_running_loop()
    bound.setblocking(False)
    bound.listen(512)
    overdue = loop.create_task(self._close_overdue())
    try:
      while True:
        try:
          accepted, _ = await loop.sock_accept(bound)
          await self._make_room()
          await loop.connect_accepted_socket(lambda: _Connection(self), accepted)
        except OSError as e:
          self._say(f'a connection cannot be accepted: {e.strerror or e}')
          await asyncio.sleep(0.1)
    finally:
      overdue.cancel()
      bound.close()

  async def close(self, seconds: float) -> None:
    """Closes all connections; those that send answers have `seconds` for it."""
    await asyncio.sleep(0)  # requests that have come begin
    self.pre_shutdown()
    await self.shutdown(seconds)

  def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
    super().connection_made(handler, transport)
    self._open[handler] = transport
    self._waits(handler)

  def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
    self._open.pop(handler, None)
    self._waiting.pop(handler, None)
    super().connection_lost(handler, exc)

  def _waits(self, connection: web.RequestHandler) -> float:
    """Notes that a connection waits for its client from now on; returns since when."""
    self._waiting.pop(connection, None)
    if connection in self._open:
      self._waiting[connection] = time.monotonic()
    return self._waiting.get(connection, 0.0)

  async def _watched(self, request: web.BaseRequest) -> web.Response:
    """Answers a request; its connection waits for the client until the body is here, and again after the answer."""
    connection = request.protocol
    since = self._waits(connection)

    def arrived() -> None:
      if self._waiting.get(connection) == since:
        del self._waiting[connection]

    request.content.on_eof(arrived)
    try:
      return await self._answer(request)
    finally:
      self._waits(connection)

  async def _make_room(self) -> None:
    while len(self._open) >= self._most:
      if self._waiting:
        self._say(f'{self._most} connections are open: those that wait for their clients longest are closed for others')
        self._drop(next(iter(self._waiting)))
        await asyncio.sleep(0)  # which closes the socket
      else:
        await asyncio.sleep(0.01)

  async def _close_overdue(self) -> None:
    while True:
      await asyncio.sleep(min(1.0, self._seconds / 4))
      begin = time.monotonic() - self._seconds
      for connection in [connection for connection, since in self._waiting.items() if since < begin]:
        self._drop(connection)

  def _drop(self, connection: web.RequestHandler) -> None:
    del self._waiting[connection]
    self._open[connection].abort()  # without what the client does not read

  def _say(self, text: str) -> None:
    """One line a minute at most: clients can cause it at will."""
    if time.monotonic() >= self._quiet_until:
      print(text, file=sys.stderr, flush=True)
      self._quiet_until = time.monotonic() + _SAY_SECONDS


class _Connection(web.RequestHandler):
  """aiohttp's reader of requests, which answers what is none in JSON."""

  __slots__ = ('_malformed',)

  def __init__(self, connections: Connections):
    super().__init__(connections, loop=asyncio.get_running_loop(), access_log=None, lingering_time=_LINGER_SECONDS)
    self._malformed = connections.malformed

  def log_exception(self, *args, exc_info=None, **more) -> None:
    """Leaves no trace of a body that cannot be decoded, whose rest aiohttp reads after the answer."""
    if not isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
      super().log_exception(*args, exc_info=exc_info, **more)

  def handle_error(self, request, status=500, exc=None, message=None) -> web.StreamResponse:
    """Answers what is no HTTP request in one line of JSON, and leaves no trace of it in the log."""
    if not isinstance(exc, HttpProcessingError):
      return super().handle_error(request, status, exc, message)
    if request.writer.output_size:
      raise ConnectionError('an answer has begun')
    if isinstance(exc, LineTooLong):
      status, message = 431, 'the URL or a header is too long; at most 8190 bytes are taken'
    elif 'Too many headers' in exc.message:
      status, message = 431, 'there are too many headers'
    elif isinstance(exc, ContentEncodingError):
      status, message = 415, 'that Content-Encoding is not read: use gzip, deflate or none'
    else:  # with the text and a mark below what is wrong, on lines of their own
      message = f'not an HTTP request: {" ".join(exc.message.split()).rstrip(" ^"):.200}'
    return self._malformed(status, message)
