"""HTTP interface: LibreTranslate's form of questions and answers, limits, errors, metrics and the page, over a stub."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import types
import urllib.parse
from typing import NamedTuple

import pytest

pytest.importorskip('aiohttp')
pytest.importorskip('prometheus_client')

from aiohttp.test_utils import TestClient
from aiohttp.test_utils import TestServer

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest
from lingvo_moe.serving.http_app import HttpApp


class Hypothesis(NamedTuple):
  text: str


class Translated(NamedTuple):
  hypotheses: list
  truncated: list


class Stub:
  """A run that reverses lines; lines of more than 10 letters are truncated."""

  model, checkpoint = 'toy.Stub', 'step 3, the newest'
  over_the_length = 'over max_length=10 tokens'
  config = types.SimpleNamespace(beam_size=3)

  def __init__(self, pairs=(('de', 'en'), ('fr', 'en')), tags=()):
    self._pairs, self._tags = list(pairs), list(tags)
    self.go, self.batches = threading.Event(), []
    self.go.set()

  def pairs(self):
    return self._pairs

  def choose_target(self, requested):
    if not self._tags:
      return None
    if requested not in self._tags:
      raise UserError(f'no {requested}; {closest(str(requested), self._tags)}')
    return requested

  def answer(self, lines, target, n_best):
    self.batches.append((lines, target, n_best))
    assert self.go.wait(30)
    if 'bad' in lines:
      raise RuntimeError('secret')
    texts = [line[:10][::-1] + (f'>{target}' if target else '') for line in lines]
    hypotheses = [[Hypothesis(t + "'" * rank) for rank in range(n_best)] if t else [Hypothesis('')] for t in texts]
    return Translated(hypotheses, [i for i, line in enumerate(lines) if len(line) > 10])


def with_client(test, run=None, **options):
  """Runs test(client, run, app) with a server."""
  run = run or Stub()

  async def go():
    app = HttpApp(run, **{'batch_wait': 0.0, **options})
    async with TestClient(TestServer(app.application(), handler_cancellation=True)) as client:
      try:
        return await asyncio.wait_for(test(client, run, app), 60)
      finally:
        run.go.set()
        await asyncio.to_thread(app.batcher.close)

  return asyncio.run(go())


def ask(*queries, run=None, **options):
  """(status, answer) of each query, a dict as JSON or bytes as they are."""

  async def test(client, run, app):
    found = []
    for query in queries:
      body = query if isinstance(query, bytes) else json.dumps(query).encode()
      response = await client.post('/translate', data=body, headers={'Content-Type': 'application/json'})
      found.append((response.status, await response.json()))
    return found

  return with_client(test, run, **options)


def test_a_string_gives_a_string_and_a_list_a_list():
  assert ask(
    {'q': 'abc', 'source': 'de', 'target': 'en'},
    {'q': ['abc', '', 'déf'], 'source': 'auto', 'target': 'en', 'format': 'text', 'api_key': ''},
    {'q': []},
  ) == [
    (200, {'translatedText': 'cba'}),
    (200, {'translatedText': ['cba', '', 'féd']}),
    (200, {'translatedText': []}),
  ]


def test_lines_of_a_text_are_translated_each_and_stay_lines():
  run = Stub()
  assert ask({'q': 'ab\r\n\ncd\n'}, run=run) == [(200, {'translatedText': 'ba\n\ndc\n'})]
  assert run.batches[-1][0] == ['ab', '', 'cd', '']


def test_alternatives_follow_the_best():
  run = Stub()
  queries = {'q': 'ab', 'alternatives': 2}, {'q': ['a\nb', ''], 'alternatives': 1}, {'q': 'ab', 'alternatives': 3}
  assert ask(*queries, run=run) == [
    (200, {'translatedText': 'ba', 'alternatives': ["ba'", "ba''"]}),
    (200, {'translatedText': ['a\nb', ''], 'alternatives': [["a'\nb'"], []]}),
    (400, {'error': 'alternatives must be at most 2, the beam less one'}),
  ]
  assert {n_best for _, _, n_best in run.batches} == {3}  # one program for any number


def test_a_line_over_the_length_is_translated_in_part_with_a_warning():
  long = '0123456789abc'
  part = 'is over max_length=10 tokens and was translated in part'
  assert ask({'q': long}, {'q': ['a', f'b\n{long}']}) == [
    (200, {'translatedText': '9876543210', 'warnings': [f'q {part}']}),
    (200, {'translatedText': ['a', 'b\n9876543210'], 'warnings': [f'line 2 of q[1] {part}']}),
  ]


def test_a_form_is_taken_as_libretranslates_clients_send_it():
  async def test(client, run, app):
    form = {'Content-Type': 'application/x-www-form-urlencoded'}
    found = []
    for body in ({'q': 'äb c', 'source': 'de', 'target': 'en', 'alternatives': '1'}, {'q': ['a', 'b']}, {'p': 'a'}):
      data = urllib.parse.urlencode(body, doseq=True)
      found.append(await (await client.post('/translate', data=data, headers=form)).json())
    return found

  one, two, none = with_client(test)
  assert one == {'translatedText': 'c bä', 'alternatives': ["c bä'"]} and two == {'translatedText': ['a', 'b']}
  assert none['error'].startswith('missing q')


def test_mistakes_are_answered_with_400():
  wrong = {
    b'{"q": ': 'the body must be JSON, with Content-Type: application/json; Expecting value',
    b'\xff\xfe{}"': 'the body must be JSON',
    b'[' * 100_000: 'the body must be JSON, with Content-Type: application/json; it is nested too deeply',
    b'["abc"]': 'the body must be a JSON object',
    b'{"q": "\\ud800"}': 'q must be Unicode; it holds half of a surrogate pair',
    b'{}': 'missing q',
    b'{"q": 3}': 'q must be a string or a list of strings',
    b'{"q": ["a", null]}': 'q must be a string or a list of strings',
    b'{"q": "a", "format": "html"}': "format must be 'text'",
    b'{"q": "a", "alternatives": -1}': 'alternatives must be a number',
    b'{"q": "a", "alternatives": true}': 'alternatives must be a number',
    b'{"q": "a", "source": ["de"]}': 'source must be the code of a language',
    b'{"q": "a", "source": "xx"}': 'xx is not a source language of this model; it has de, fr',
    b'{"q": "a", "target": "de"}': 'de is not a target language of this model; it has en',
  }
  for (body, message), (status, answer) in zip(wrong.items(), ask(*wrong), strict=True):
    assert (status, list(answer)) == (400, ['error']), body
    assert answer['error'].startswith(message), body


def test_models_of_several_targets_are_told_which():
  run = Stub([('en', 'de'), ('en', 'fr')], tags=['de', 'fr'])
  assert ask({'q': 'ab', 'target': 'de'}, {'q': 'ab'}, run=run) == [
    (200, {'translatedText': 'ba>de'}),
    (400, {'error': 'target must be given; one of de, fr'}),
  ]
  unknown = Stub([], tags=['de', 'fr'])
  assert ask({'q': 'ab', 'source': 'anything', 'target': 'xx'}, run=unknown) == [
    (400, {'error': 'no xx; known: de, fr'})
  ]


def test_a_body_over_the_limit_is_413_with_and_without_a_length():
  async def test(client, run, app):
    async def pieces():
      for _ in range(20):
        yield b'"' * 100

    found = [await client.post('/translate', data=data) for data in (b' ' * 1001, pieces())]
    at_limit = await client.post('/translate', data=json.dumps({'q': 'a'}).encode().ljust(1000))
    return [(r.status, await r.json()) for r in [*found, at_limit]]

  long, chunked, fits = with_client(test, max_body=1000)
  assert long == chunked == (413, {'error': 'a body has at most 1000 bytes: send fewer lines at once'})
  assert fits == (200, {'translatedText': 'a'})
  assert ask({'q': 'a\n' * 5}, max_waiting=5) == [(413, {'error': 'q has 6 lines; at most 5 are taken at once'})]


def test_a_full_queue_is_503_with_retry_after_and_requests_that_wait_share_a_batch():
  async def test(client, run, app):
    run.go.clear()
    post = lambda q: asyncio.create_task(client.post('/translate', json={'q': q}))
    waits = [post('first')]
    while not run.batches:
      await asyncio.sleep(0.001)
    waits += [post(f'{i}') for i in range(3)]
    while app.batcher.waiting < 3:
      await asyncio.sleep(0.001)
    refused = await client.post('/translate', json={'q': 'x\ny'})
    run.go.set()
    answers = [(await (await wait).json())['translatedText'] for wait in waits]
    return refused.status, refused.headers['Retry-After'], await refused.json(), answers

  run = Stub()
  status, retry, error, answers = with_client(test, run, max_waiting=4)
  assert (status, retry, error) == (503, '1', {'error': '3 lines are waiting: try again in 1 s'})
  assert answers == ['tsrif', '0', '1', '2']
  assert [sorted(lines) for lines, *_ in run.batches] == [['first'], ['0', '1', '2']]


def test_lines_of_a_client_that_hangs_up_are_not_translated():
  async def test(client, run, app):
    run.go.clear()
    first = asyncio.create_task(client.post('/translate', json={'q': 'first'}))
    while not run.batches:
      await asyncio.sleep(0.001)
    leaves = asyncio.create_task(client.post('/translate', json={'q': 'leaves'}))
    while not app.batcher.waiting:
      await asyncio.sleep(0.001)
    leaves.cancel()
    while app.batcher.waiting:
      await asyncio.sleep(0.001)
    run.go.set()
    return await (await first).json(), await (await client.get('/metrics')).text()

  run = Stub()
  answer, metrics = with_client(test, run)
  assert answer == {'translatedText': 'tsrif'} and [lines for lines, *_ in run.batches] == [['first']]
  assert 'lingvo_moe_requests_total{path="/translate",status="499"} 1.0' in metrics


def test_a_failure_tells_nothing_and_the_log_all(capsys):
  assert ask({'q': 'bad'}, {'q': 'good'}) == [
    (500, {'error': 'internal error; the log of the server has it'}),
    (200, {'translatedText': 'doog'}),
  ]
  assert 'RuntimeError: secret' in capsys.readouterr().err


def test_health_languages_metrics_and_errors_of_paths():
  async def test(client, run, app):
    await client.post('/translate', json={'q': ['ab', '0123456789abc']})
    await asyncio.to_thread(app.batcher.close)  # which has then counted the batch
    found = {path: await client.get(path) for path in ('/health', '/languages', '/metrics', '/nothing', '/translate')}
    read = {path: (r.status, await (r.text() if path == '/metrics' else r.json())) for path, r in found.items()}
    app.draining = True
    drains = await client.get('/health')
    refused = await client.post('/translate', json={'q': 'ab'})
    return (
      read,
      found,
      (drains.status, (await drains.json())['status']),
      (refused.status, 'Retry-After' in refused.headers),
    )

  read, responses, drains, refused = with_client(test)
  ok = {'status': 'ok', 'model': 'toy.Stub', 'checkpoint': 'step 3, the newest', 'waiting_lines': 0}
  assert read['/health'] == (200, ok) and drains == (503, 'draining') and refused == (503, True)
  assert read['/languages'] == (
    200,
    [
      {'code': 'de', 'name': 'German', 'targets': ['en']},
      {'code': 'en', 'name': 'English', 'targets': []},
      {'code': 'fr', 'name': 'French', 'targets': ['en']},
    ],
  )
  assert read['/nothing'] == (404, {'error': 'Not Found'})
  assert (
    read['/translate'] == (405, {'error': 'Method Not Allowed'}) and responses['/translate'].headers['Allow'] == 'POST'
  )
  status, text = read['/metrics']
  assert status == 200 and responses['/metrics'].headers['Content-Type'].startswith('text/plain; version=')
  samples = dict(line.rsplit(' ', 1) for line in text.splitlines() if not line.startswith('#'))
  assert samples['lingvo_moe_requests_total{path="/translate",status="200"}'] == '1.0'
  assert samples['lingvo_moe_truncated_lines_total'] == '1.0' and samples['lingvo_moe_waiting_lines'] == '0.0'
  assert samples['lingvo_moe_batch_lines_sum'] == '2.0' and float(samples['process_resident_memory_bytes']) > 1e6
  assert samples['lingvo_moe_model_info{checkpoint="step 3, the newest",model="toy.Stub"}'] == '1.0'


def test_the_page_asks_nobody_else_and_labels_its_fields():
  async def test(client, run, app):
    response = await client.get('/')
    return response.headers, await response.text()

  headers, html = with_client(test)
  assert headers['Content-Type'] == 'text/html; charset=utf-8'
  policy = headers['Content-Security-Policy']
  assert "default-src 'none'" in policy and 'unsafe' not in policy and policy.count('sha256-') == 2
  assert not re.search(r'(src|href|url)\s*[=(]', html) and '://' not in html and ' style=' not in html
  fields = re.findall(r'<(?:textarea|select|output)[^>]* id="(\w+)"', html) + re.findall(r'<select id="(\w+)"', html)
  assert set(fields) == {'q', 'source', 'target', 'result'} and all(f'<label for="{f}"' in html for f in fields)
  assert '<html lang="en">' in html and 'role="status"' in html
