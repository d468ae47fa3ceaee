"""Soak test of a server: clients that ask and clients that hang up, and a count of what was answered.

  python tests/addons/serving/soak.py runs/mine --seconds=600 --lines=FILE

Starts python -m lingvo_moe.serve, sends it random Unicode and lines of FILE from 20 clients, a tenth of whose requests
hang up, ends it by SIGTERM, translates the lines of the answered requests again with the library, and prints JSON:
requests by outcome, seconds from request to answer at the 50th and the 99th percentile, sentences a second of both, and
the server's resident memory over time.
"""

import argparse
import asyncio
import collections
import json
import random
import signal
import subprocess
import sys
import time

import aiohttp

_PLANES = (
  (0x20, 0x7F),
  (0xA0, 0x24F),
  (0x370, 0x5FF),
  (0x600, 0x6FF),
  (0x900, 0xDFF),
  (0x3040, 0x9FFF),
  (0x1F300, 0x1FAFF),
)
_CONTROL = '\x00\x07\t\x1b\u200b\u200f\u2028\ufeff\ufffd\U0010ffff'


def random_line(rng: random.Random, lines: list[str]) -> str:
  """A line of the file, random Unicode, both mixed, nothing, or one that is too long."""
  kind = rng.random()
  if kind < 0.6:
    return rng.choice(lines)
  if kind < 0.65:
    return ''
  low, high = rng.choice(_PLANES)
  noise = ''.join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 40)))
  if kind < 0.8:
    return noise
  if kind < 0.95:
    return f'{rng.choice(lines)} {noise}{rng.choice(_CONTROL)}{rng.choice(lines)}'
  return ' '.join(rng.choice(lines) for _ in range(20))


class Tally:
  """What happened to requests."""

  def __init__(self):
    self.outcomes = collections.Counter()
    self.seconds: list[float] = []
    self.sentences: list[str] = []
    self.wrong: list[str] = []


async def client(number: int, url: str, lines: list[str], until: float, tally: Tally) -> None:
  rng = random.Random(number)
  async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
    while time.monotonic() < until:
      q = [random_line(rng, lines) for _ in range(rng.choice((1, 1, 1, 2, 8)))]
      if rng.random() < 0.1:
        await _hang_up(rng, url, q, tally)
      else:
        await _ask(session, url, q, tally)


async def _ask(session: aiohttp.ClientSession, url: str, q: list[str], tally: Tally) -> None:
  one = len(q) == 1 and '\n' not in q[0]
  begin = time.monotonic()
  try:
    async with session.post(f'{url}/translate', json={'q': q[0] if one else q, 'source': 'auto'}) as response:
      answer = await response.json()
  except (aiohttp.ClientError, TimeoutError, ValueError) as e:
    tally.outcomes['lost'] += 1
    tally.wrong.append(f'{e!r} for {q!r:.200}')
    return
  tally.outcomes[str(response.status)] += 1
  if response.status == 200:
    tally.seconds.append(time.monotonic() - begin)
    tally.sentences += q
    texts = [answer['translatedText']] if one else answer['translatedText']
    if len(texts) != len(q) or any((not line.strip()) and text for line, text in zip(q, texts)):
      tally.wrong.append(f'{q!r:.200} gave {answer!r:.200}')
  elif response.status == 503:
    await asyncio.sleep(float(response.headers['Retry-After']))
  else:
    tally.wrong.append(f'{response.status} {answer!r:.200} for {q!r:.200}')


async def _hang_up(rng: random.Random, url: str, q: list[str], tally: Tally) -> None:
  """Sends a request or a part of one, and leaves soon."""
  host, port = url.removeprefix('http://').split(':')
  body = json.dumps({'q': q}).encode()
  head = (
    f'POST /translate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n'
  )
  request = head.encode() + body
  _, writer = await asyncio.open_connection(host, int(port))
  writer.write(request[: rng.choice((len(request), len(request), rng.randrange(len(request))))])
  await asyncio.sleep(rng.random() * 0.1)
  writer.transport.abort() if rng.random() < 0.5 else writer.close()
  tally.outcomes['hung up'] += 1


def resident_mib(pid: int) -> float:
  with open(f'/proc/{pid}/statm', encoding='ascii') as f:
    return int(f.read().split()[1]) * 4096 / 2**20


async def _watch(pid: int, every: float, until: float, sizes: list[float]) -> None:
  while time.monotonic() < until:
    sizes.append(round(resident_mib(pid), 1))
    print(f'{max(0, until - time.monotonic()):.0f} s left, {sizes[-1]} MiB', file=sys.stderr, flush=True)
    await asyncio.sleep(min(every, max(0.1, until - time.monotonic())))
  sizes.append(round(resident_mib(pid), 1))


async def _load(url: str, pid: int, lines: list[str], clients: int, seconds: float, tally: Tally) -> list[float]:
  sizes: list[float] = []
  until = time.monotonic() + seconds
  await asyncio.gather(
    _watch(pid, seconds / 10, until, sizes), *(client(number, url, lines, until, tally) for number in range(clients))
  )
  return sizes


def soak(logdir: str, lines: list[str], seconds: float, clients: int = 20) -> dict:
  """Runs a server under load, then the library on what it answered; returns the figures."""
  command = [sys.executable, '-m', 'lingvo_moe.serve', logdir, '--port=0']
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    line = server.stderr.readline()
    if not line.startswith('serving'):  # nothing else is said before
      server.kill()
      raise SystemExit(line + server.stderr.read())
    url, tally = line.split(' on ')[-1].strip(), Tally()
    warm = min(60.0, seconds / 5)  # allocators and the cache of kernels fill
    asyncio.run(_load(url, server.pid, lines, clients, warm, Tally()))
    sizes = asyncio.run(_load(url, server.pid, lines, clients, seconds, tally))
    metrics = asyncio.run(_metrics(url))
    server.send_signal(signal.SIGTERM)
    status, said = server.wait(120), server.stderr.read()
  ordered = sorted(tally.seconds)
  percentile = lambda share: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)
  return {
    'seconds': seconds,
    'clients': clients,
    'requests': dict(tally.outcomes),
    'wrong': tally.wrong[:5],
    'p50_seconds': percentile(0.5),
    'p99_seconds': percentile(0.99),
    'lines_per_batch': round(metrics['lingvo_moe_batch_lines_sum'] / metrics['lingvo_moe_batch_lines_count'], 1),
    'sentences_per_second': round(len(tally.sentences) / seconds, 1),
    'decoder_sentences_per_second': _library_pace(logdir, tally.sentences),
    'resident_mib': sizes,
    'exit_status': status,
    'stderr': said[:2000],
  }


async def _metrics(url: str) -> dict[str, float]:
  async with aiohttp.ClientSession() as session, session.get(f'{url}/metrics') as response:
    text = await response.text()
  return {name: float(value) for name, value in (l.rsplit(' ', 1) for l in text.splitlines() if l[0] != '#')}


def _library_pace(logdir: str, sentences: list[str]) -> float:
  """Sentences a second of the library, which batches a thousand by length, in 30 seconds or more."""
  import lingvo_moe
  from lingvo_moe.text.text_model import Asked

  run = lingvo_moe.load(logdir)
  target = run.choose_target(None)
  run.answer(sentences[:64], Asked(target))
  begin, done = time.monotonic(), 0
  while done < len(sentences) and time.monotonic() < begin + 30:
    part = sentences[done : done + 1000]
    run.answer(part, Asked(target))
    done += len(part)
  return round(done / (time.monotonic() - begin), 1)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('logdir')
  parser.add_argument('--seconds', type=float, default=600)
  parser.add_argument('--clients', type=int, default=20)
  parser.add_argument('--lines', required=True)
  arguments = parser.parse_args()
  with open(arguments.lines, encoding='utf-8') as f:
    given = f.read().splitlines()
  print(json.dumps(soak(arguments.logdir, given, arguments.seconds, arguments.clients), indent=2))
