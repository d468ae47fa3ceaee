"""HTTP server: binds, serves until SIGTERM or SIGINT, then answers what it has accepted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from lingvo_moe.addons.serving.connections import Connections
from lingvo_moe.core.errors import UserError

if TYPE_CHECKING:  # it imports TensorFlow, which takes seconds, and a port is taken first
  from lingvo_moe.addons.serving.http_app import HttpApp

_SEND_SECONDS = 5  # for clients to take the last answers


def bind(host: str, port: int) -> socket.socket:
  """A socket bound to host and port, 0 for any that is free; UserError where that cannot be."""
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
    bound.listen(0)  # only now is a port taken that another listens on
    return bound
  except (OSError, UnicodeError) as e:  # the latter of a name that is no host's
    reasons = {
      errno.EADDRINUSE: f'port {port} of {host} is taken: use another --port, or end the program that has it',
      errno.EACCES: f'port {port} may not be used by this user: use a --port from 1024 on',
    }
    reason = getattr(e, 'strerror', None) or e
    message = reasons.get(getattr(e, 'errno', None), f'cannot listen on --host={host} --port={port}: {reason}')
    raise UserError(message) from None


def url(bound: socket.socket) -> str:
  host, port = bound.getsockname()[:2]
  return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'


async def serve(http_app: HttpApp, bound: socket.socket, drain_seconds: float, started: Callable[[], None]) -> bool:
  """Serves until SIGTERM or SIGINT; a second one ends the process at once.

  Args:
    http_app: the handlers.
    bound: from `bind`.
    drain_seconds: how long accepted requests may take after the signal.
    started: called when requests are accepted.

  Returns:
    Whether all accepted requests were answered.
  """
  loop, stop = asyncio.get_running_loop(), asyncio.Event()
  signals = signal.SIGTERM, signal.SIGINT
  for number in signals:
    loop.add_signal_handler(number, stop.set)
  connections = Connections(http_app.answer, http_app.malformed)
  accepting = loop.create_task(connections.accept(bound))
  started()
  await stop.wait()
  for number in signals:
    loop.remove_signal_handler(number)
  http_app.draining = True
  accepting.cancel()  # connections that are open stay
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(drain_seconds):
      while http_app.in_flight:
        await asyncio.sleep(0.01)
  drained = not http_app.in_flight
  await connections.close(_SEND_SECONDS)  # sends what was answered
  if drained:
    await asyncio.to_thread(http_app.batcher.close)
  return drained
