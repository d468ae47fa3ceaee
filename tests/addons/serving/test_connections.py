"""Connections: how many there are, how long one waits for its client, and answers to what is no HTTP request."""

import asyncio
import json
import resource
import subprocess
import sys

import pytest

pytest.importorskip('aiohttp')

from aiohttp import web

from lingvo_moe.addons.serving import connections as connections_lib
from lingvo_moe.addons.serving import server
from lingvo_moe.addons.serving.connections import Connections
from lingvo_moe.core.errors import UserError

GET = b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n'
POST = b'POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n'


def serving(test, answer=None, **options):
  """Runs test(connect) with a server, whose `answer` is the body in capitals unless one is given."""

  async def capitals(request):
    return web.Response(body=(await request.content.read()).upper())

  malformed = lambda status, why: web.json_response({'error': why}, status=status)

  async def go():
    bound = server.bind('127.0.0.1', 0)
    port = bound.getsockname()[1]
    connections = Connections(answer or capitals, malformed, **options)
    accepting = asyncio.create_task(connections.accept(bound))
    try:
      return await asyncio.wait_for(test(lambda: asyncio.open_connection('127.0.0.1', port)), 30)
    finally:
      accepting.cancel()
      await connections.close(0.1)

  return asyncio.run(go())


async def ended(reader):
  """What the server sends until it closes; None where it does not."""
  try:
    return await asyncio.wait_for(reader.read(), 10)
  except TimeoutError:
    return None
  except ConnectionError:
    return b''


@pytest.mark.parametrize('sent', [b'', b'GET / HT', GET[:-2], POST, POST + b'ab', GET + GET[:-2]])
def test_a_connection_whose_client_sends_no_whole_request_is_closed(sent):
  async def test(connect):
    reader, writer = await connect()
    writer.write(sent)
    return (await ended(reader)).count(b'HTTP/1.1 200'), await ended((await connect())[0])

  assert serving(test, client_seconds=0.3) == (sent.count(GET), b'')


def test_a_body_that_comes_after_the_answer_leaves_a_connection_that_waits():
  async def refuse(request):
    return web.Response(body=b'no')

  async def test(connect):
    reader, writer = await connect()
    writer.write(POST)
    assert (await reader.readuntil(b'no')).startswith(b'HTTP/1.1 200')
    writer.write(b'abcd')
    return await ended(reader)

  assert serving(test, refuse, client_seconds=0.3) == b''


def test_bytes_that_trickle_in_do_not_keep_a_connection():
  async def test(connect):
    reader, writer = await connect()
    closed, sent = asyncio.create_task(ended(reader)), 0
    while not closed.done():
      writer.write(GET[sent : sent + 1])
      sent += 1
      await asyncio.sleep(0.05)
    return sent < len(GET), await closed

  assert serving(test, client_seconds=0.2) == (True, b'')


def test_an_answer_that_is_not_read_is_not_kept(monkeypatch):
  """Its descriptor is free again, though the client neither reads nor leaves."""
  lost, closed = asyncio.Event(), Connections.connection_lost
  monkeypatch.setattr(Connections, 'connection_lost', lambda *args: (lost.set(), closed(*args)))

  async def answer(request):
    return web.Response(body=b'a' * 10_000_000)

  async def test(connect):
    _, writer = await connect()
    writer.transport.pause_reading()
    writer.write(GET)
    await asyncio.wait_for(lost.wait(), 5)

  serving(test, answer, client_seconds=0.2)


def test_at_the_bound_the_connection_that_waits_longest_makes_room(capsys):
  async def test(connect):
    first, second = await connect(), await connect()
    second[1].write(POST)
    await asyncio.sleep(0.05)
    third = await connect()
    third[1].write(GET)
    assert (await third[0].readline()) == b'HTTP/1.1 200 OK\r\n'
    assert await ended(first[0]) == b''
    second[1].write(b'abcd')
    return (await second[0].readuntil(b'ABCD'))[:15]

  assert serving(test, most=2) == b'HTTP/1.1 200 OK'
  assert capsys.readouterr().err == (
    '2 connections are open: those that wait for their clients longest are closed for others\n'
  )


def test_a_connection_whose_request_has_begun_waits_anew():
  async def test(connect):
    begun, idle = await connect(), await connect()
    await asyncio.sleep(0.1)  # in which they are accepted
    begun[1].write(POST)
    await asyncio.sleep(0.1)
    await connect()
    assert await ended(idle[0]) == b''
    begun[1].write(b'abcd')
    return (await begun[0].readuntil(b'ABCD'))[:15]

  assert serving(test, most=2) == b'HTTP/1.1 200 OK'


def test_connections_whose_requests_are_being_answered_stay():
  go, began = asyncio.Event(), []

  async def answer(request):
    began.append(await request.content.read())
    await go.wait()
    return web.Response(body=b'done')

  async def test(connect):
    busy = [await connect() for _ in range(2)]
    for _, writer in busy:
      writer.write(POST + b'abcd')
    while len(began) < 2:
      await asyncio.sleep(0.01)
    reader, writer = await connect()
    writer.write(GET)
    await asyncio.sleep(0.3)
    assert len(began) == 2  # it waits for room
    go.set()
    return [(await reader.readuntil(b'done'))[:15] for reader, _ in [*busy, (reader, writer)]]

  assert serving(test, answer, most=2, client_seconds=0.1) == 3 * [b'HTTP/1.1 200 OK']


def test_a_client_that_leaves_before_its_answer_ends_the_work_and_is_forgotten():
  began, cancelled = asyncio.Event(), asyncio.Event()

  async def answer(request):
    await request.content.read()
    began.set()
    try:
      await asyncio.sleep(60)
    except asyncio.CancelledError:
      cancelled.set()
      raise

  async def test(connect):
    _, writer = await connect()
    writer.write(POST + b'abcd')
    await began.wait()
    writer.transport.abort()
    await cancelled.wait()
    await asyncio.sleep(0.5)  # in which nothing is closed twice
    return await ended((await connect())[0])

  assert serving(test, answer, client_seconds=0.2) == b''


HANGING = """
import asyncio, resource, sys
from aiohttp import web
from lingvo_moe.addons.serving import server
from lingvo_moe.addons.serving.connections import Connections

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

async def answer(request):
  return web.Response(text='ok')

async def main():
  bound = server.bind('127.0.0.1', 0)
  print(bound.getsockname()[1], flush=True)
  await Connections(answer, None).accept(bound)

asyncio.run(main())
"""


def test_300_connections_that_hang_shut_nobody_out_where_200_files_may_be_open():
  with subprocess.Popen([sys.executable, '-c', HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    try:
      port = int(process.stdout.readline())
      asyncio.run(asyncio.wait_for(_hang(port, 300), 60))
    finally:
      process.kill()
    said = process.stderr.read().decode().splitlines()
  assert len(said) == 1 and said[0].endswith('those that wait for their clients longest are closed for others'), said


async def _hang(port, number):
  held = [await asyncio.open_connection('127.0.0.1', port) for _ in range(number)]
  for _, writer in held[::2]:
    writer.write(GET[:-2])
  for _ in range(3):
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    writer.write(GET)
    assert await asyncio.wait_for(reader.readline(), 10) == b'HTTP/1.1 200 OK\r\n'
  for _, writer in held:
    writer.transport.abort()


def test_the_bound_leaves_descriptors_free_and_a_limit_too_low_is_said(monkeypatch):
  open_now = 10
  monkeypatch.setattr(connections_lib.os, 'listdir', lambda path: ['0'] * open_now)
  for limit, most in ((resource.RLIM_INFINITY, 2000), (10**6, 2000), (1024, 982), (43, 1)):
    monkeypatch.setattr(resource, 'getrlimit', lambda kind, limit=limit: (limit, limit))
    assert connections_lib.most_connections() == most
  monkeypatch.setattr(resource, 'getrlimit', lambda kind: (42, 42))
  with pytest.raises(UserError, match='a limit of 42 open files leaves none for connections: raise it'):
    connections_lib.most_connections()


@pytest.mark.parametrize(
  'sent, status, error',
  [
    (b'garbage\r\n\r\n', 400, "not an HTTP request: Invalid method encountered: b'garbage'"),
    (b'\x16\x03\x01\x00\xa5\x01', 400, 'not an HTTP request: Received HTTPS traffic on an HTTP port'),
    (b'GET / HTTP/9.9\r\n\r\n', 400, 'not an HTTP request: Bad status line: Invalid HTTP version'),
    (b'GET / HTTP/1.1\r\n\r\n', 400, "not an HTTP request: Missing 'Host' header"),
    (b'GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n', 400, "not an HTTP request: Duplicate 'Host' header"),
    (GET[:-2] + b'no header\r\n\r\n', 400, 'not an HTTP request: Invalid header token'),
    (GET[:-2] + b'Content-Length: x\r\n\r\n', 400, 'not an HTTP request: Invalid character in Content-Length'),
    (
      GET[:-2] + b'Transfer-Encoding: chunked\r\n\r\nzz\r\n',
      400,
      'not an HTTP request: Invalid character in chunk size',
    ),
    (GET[:-2] + b'Content-Length: 1\r\nContent-Encoding: zstd\r\n\r\na', 415, 'that Content-Encoding is not read'),
    (b'GET /' + b'a' * 9000 + b' HTTP/1.1\r\n', 431, 'the URL or a header is too long'),
    (GET[:-2] + b'A: ' + b'a' * 9000 + b'\r\n', 431, 'the URL or a header is too long'),
    (GET[:-2] + b'A: a\r\n' * 300 + b'\r\n', 431, 'there are too many headers'),
  ],
)
def test_what_is_no_http_is_answered_in_json_and_leaves_no_trace(sent, status, error, caplog, capsys):
  async def test(connect):
    reader, writer = await connect()
    writer.write(sent)
    return await ended(reader)

  head, _, body = serving(test).partition(b'\r\n\r\n')
  assert int(head.split()[1]) == status and b'Content-Type: application/json' in head
  assert json.loads(body)['error'].startswith(error) and len(body) < 300
  assert not caplog.records and capsys.readouterr().err == ''
