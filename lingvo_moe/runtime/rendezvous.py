"""Rendezvous of a run's processes: each waits for all others, names those missing, and obeys signals meanwhile.

JAX waits for them in native code, where Python handles no signal, and ends a process that waited in vain with a stack
trace. So they meet here first: process 0 listens at the coordinator's address, the others connect and say who they are,
and once all have come it sends them on. Then the address is free for JAX's own coordinator.
"""

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Callable

from lingvo_moe.core.errors import UserError

_FIRST_WORD_SECONDS = 3  # of waiting before that is said
_WORD_SECONDS = 30  # between two lines that say so
_RETRY_SECONDS = 0.2
_PATIENCE_SECONDS = 5  # more, for those that process 0 knows of: it gives up first, and names who is missing
_GO = b'lingvo_moe: go'
_ERROR = b'lingvo_moe: error: '  # another answer is that of JAX's coordinator, in a run that a process has left
_HELLO = 'lingvo_moe: process {} of {}\n'
_HELLO_FORM = re.compile(rb'lingvo_moe: process (\d{1,9}) of (\d{1,9})\n')


def meet(address: str, count: int, index: int, seconds: float, say: Callable[[str], None]) -> None:
  """Returns when all `count` processes of a run have called it, of which this one has number `index`.

  Process 0 listens at the address, HOST:PORT. A process waits `seconds` for the others; `say` prints a line.

  Raises:
    UserError: a process did not come, or says something else than the others.
  """
  wait = _Wait(address, count, index, seconds, say)
  (_gather if index == 0 else _join)(wait)


class _Wait:
  """Time that is left, and lines that say what for."""

  def __init__(self, address: str, count: int, index: int, seconds: float, say: Callable[[str], None]):
    host, _, port = address.rpartition(':')
    if not _is_host(host) or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
      raise UserError(f'--coordinator is HOST:PORT, such as node0:7000; saw {address!r}')
    self.host, self.port = host.strip('[]'), int(port)
    self.address, self.count, self.index = address, count, index
    self._seconds, self._say = seconds, say
    self._begun = time.monotonic()
    self._next_word = self._begun + _FIRST_WORD_SECONDS

  def left(self, whom: str, patience: float = 0) -> float:
    """Seconds to wait at most before the next call; says which processes this one waits for, where that is due.

    Raises:
      UserError: the time of the run, and `patience` seconds more, are over.
    """
    now, end = time.monotonic(), self._begun + self._seconds + patience
    if now >= end:
      raise UserError(
        f'process {self.index} of {self.count} waited {self._seconds:g} s for {whom}, at {self.address}: start all '
        f'processes, with the same coordinator, or wait longer by --connect_seconds'
      )
    if now >= self._next_word:
      self._next_word = now + _WORD_SECONDS
      self._say(f'process {self.index} of {self.count} waits for {whom}, at {self.address} ({end - now:.0f} s left)')
    return min(end, self._next_word) - now


def _gather(wait: _Wait) -> None:
  """Process 0: waits for all others, and lets them go on."""
  with contextlib.ExitStack() as stack:
    selector = stack.enter_context(selectors.DefaultSelector())
    server = stack.enter_context(_listen(wait))
    selector.register(server, selectors.EVENT_READ)
    joined: dict[socket.socket, int] = {}  # processes that have come, by connection
    try:
      while missing := sorted(set(range(1, wait.count)) - set(joined.values())):
        more = f' and {len(missing) - 8} more' if len(missing) > 8 else ''
        whom = f'process{"es" if missing[1:] else ""} {", ".join(map(str, missing[:8]))}{more}'
        for key, _ in selector.select(wait.left(whom)):
          if key.fileobj is server:
            selector.register(stack.enter_context(server.accept()[0]), selectors.EVENT_READ)
          elif not _has_joined(key.fileobj, joined, wait):  # gone, or none of us
            selector.unregister(key.fileobj)
            key.fileobj.close()
    except UserError as e:
      for connection in joined:
        with contextlib.suppress(OSError):
          connection.sendall(_ERROR + str(e).encode())
      raise
    for connection in joined:
      connection.sendall(_GO)


def _listen(wait: _Wait) -> socket.socket:
  everywhere = {'family': socket.AF_INET6, 'dualstack_ipv6': True} if socket.has_dualstack_ipv6() else {}
  try:
    return socket.create_server(('', wait.port), backlog=1024, **everywhere)
  except OSError as e:
    raise UserError(
      f'process 0 listens at port {wait.port} of --coordinator={wait.address}, which it cannot ({e.strerror}): choose '
      'another port, or end what listens there'
    ) from None


def _has_joined(connection: socket.socket, joined: dict[socket.socket, int], wait: _Wait) -> bool:
  """Reads the number of a process from a connection into `joined`; False if it is no process of ours."""
  word = b''
  with contextlib.suppress(OSError):
    word = connection.recv(1024)
  hello = _HELLO_FORM.fullmatch(word)
  if not hello:
    joined.pop(connection, None)
    return False
  index, count = map(int, hello.groups())
  twice = index in joined.values()
  joined[connection] = index
  if twice or count != wait.count or not 0 < index < count:
    raise UserError(
      f'processes of a run have different numbers below one --num_processes; process 0 of {wait.count} met '
      f'process {index} of {count}' + (' twice' if twice else '') + f' at {wait.address}'
    )
  return True


def _join(wait: _Wait) -> None:
  """Another process: says who it is, and waits until process 0 lets it go on."""
  while True:
    seconds = wait.left('process 0')
    with contextlib.suppress(OSError):  # process 0 does not listen yet, or was lost and may come back
      with socket.create_connection((wait.host, wait.port), timeout=seconds) as connection:
        connection.sendall(_HELLO.format(wait.index, wait.count).encode())
        word = _answer(connection, wait)
        if word == _GO:
          return
        if word.startswith(_ERROR):
          raise UserError(word.removeprefix(_ERROR).decode())
    time.sleep(_RETRY_SECONDS)


def _answer(connection: socket.socket, wait: _Wait) -> bytes:
  """Word from process 0; empty when it is gone."""
  while True:
    connection.settimeout(wait.left('processes that process 0 names', _PATIENCE_SECONDS))
    with contextlib.suppress(TimeoutError):
      return connection.recv(1024)


def _is_host(name: str) -> bool:
  try:
    return bool(name.encode('idna'))
  except UnicodeError:
    return False
