"""Language models over HTTP: continuations, their values, streams, and clients that go away; over a stub."""

import asyncio
import json
import threading
import time

import pytest

pytest.importorskip('aiohttp')
pytest.importorskip('prometheus_client')

from addons.serving import test_http

from lingvo_moe.core.errors import UserError
from lingvo_moe.text.text_model import TextModel
from lingvo_moe.text.translator import Hypothesis


class Stub:
  """A language model that continues a prompt by its letters, slowly, max_new_tokens of them."""

  model, checkpoint, path = 'toy.Language', 'step 3, the newest', 'runs/stub'
  beam_size, continues_text, search = 2, True, 'sample'
  sampling = TextModel.sampling

  def __init__(self, seconds=0.0):
    self.seconds, self.batches, self.drawn = seconds, [], 0
    self.go = threading.Event()

  def configured(self, name):
    values = {'sample_temperature': 1.0, 'top_k': 0, 'top_p': 1.0, 'sample_seed': 0, 'max_new_tokens': 500}
    return {**values, 'search': self.search}[name]

  def translator(self, n_best=1):
    self.n_best = n_best
    return self

  def complete(self, requests):
    self.batches.append([(request.prompt, request.sampling) for request in requests])
    texts = []
    for request in requests:
      if request.prompt == 'bad':
        raise UserError('weights must be finite')
      text = ''
      while len(text) < request.sampling.max_new_tokens:
        time.sleep(self.seconds)
        text += 'aé😀'[len(text) % 3]
        self.drawn += 1
        if not request.listen(text[-1]):
          break
      texts.append([Hypothesis(text + "'" * rank, -1.0, -1.0) for rank in range(self.n_best)])
    return texts


def ask(*queries, run=None, path='/generate'):
  async def test(client, run, app):
    responses = [await client.post(path, json=query) for query in queries]
    return [(response.status, await response.json()) for response in responses]

  return test_http.with_client(test, run or Stub())


def test_a_prompt_is_continued_with_the_values_of_its_request():
  run = Stub()
  values = {'sample_temperature': 0.5, 'top_k': 4, 'top_p': 0.9, 'sample_seed': 7, 'max_new_tokens': 3}
  found = ask(
    {'prompt': 'x', **values}, {'prompt': ['x', 'y'], **values}, {'prompt': 'x', 'n_best': 2, **values}, run=run
  )
  assert found == [
    (200, {'text': 'aé😀', 'sample_seed': 7}),
    (200, {'text': ['aé😀', 'aé😀'], 'sample_seed': 7}),
    (200, {'text': ['aé😀', "aé😀'"], 'sample_seed': 7}),
  ]
  assert [prompt for prompt, _ in run.batches[1]] == ['x', 'y'] and run.batches[0][0][1] == tuple(values.values())
  [(_, one), (_, other)] = ask({'prompt': 'x', 'max_new_tokens': 1}, {'prompt': 'x', 'max_new_tokens': 1})
  assert one['sample_seed'] != other['sample_seed']  # drawn anew, and told


def test_mistakes_are_answered_in_a_sentence():
  wrong = {
    'missing prompt: the text to continue, a string or a list of strings; the JSON object has q': {'q': 'x'},
    'top_p must be a number from 1e-06 to 1; saw 2': {'prompt': 'x', 'top_p': 2},
    'sample_seed must be a whole number from 0 to 2147483647; saw -1': {'prompt': 'x', 'sample_seed': -1},
    "max_new_tokens must be a whole number from 1 to 500; saw 'many'": {'prompt': 'x', 'max_new_tokens': 'many'},
    'n_best must be at most 2, the beam': {'prompt': 'x', 'n_best': 3},
    'a stream is of one prompt and one continuation: leave n_best out, and send a string': {
      'prompt': [],
      'stream': True,
    },
  }
  assert ask(*wrong.values()) == [(400, {'error': message}) for message in wrong]
  beam = Stub()
  beam.search = 'beam'
  [(status, answer), fine] = ask({'prompt': 'x', 'top_k': 3}, {'prompt': 'x', 'max_new_tokens': 1}, run=beam)
  assert status == 400 and answer['error'].startswith('beam search draws no samples') and fine == (200, {'text': 'a'})
  assert ask({'q': 'x'}, path='/translate') == [
    (404, {'error': 'no such path; there are /, /generate, /health, /metrics'})
  ]
  assert ask({'prompt': 'x' * 2001}) == [(413, {'error': 'a prompt has at most 2000 characters: send its end alone'})]
  assert ask({'prompt': 'bad'}) == [(500, {'error': 'weights must be finite'})]


def events(text):
  return [json.loads(event.removeprefix('data: ')) for event in text.split('\n\n') if event]


def test_a_stream_sends_each_piece_as_it_is_drawn():
  async def test(client, run, app):
    response = await client.post(
      '/generate', json={'prompt': 'x', 'stream': True, 'max_new_tokens': 4, 'sample_seed': 1}
    )
    first = await response.content.readuntil(b'\n\n')
    drawn = run.drawn
    bad = await client.post('/generate', json={'prompt': 'bad', 'stream': True})
    found = events((first + await response.content.read()).decode()), events(await bad.text())
    return response, drawn, *found, await (await client.get('/metrics')).text()

  response, drawn, found, bad, metrics = test_http.with_client(test, Stub(0.05))
  assert response.content_type == 'text/event-stream' and drawn < 4
  assert found == [*({'text': piece} for piece in 'aé😀a'), {'done': True, 'log_prob': -1.0, 'sample_seed': 1}]
  assert bad == [{'error': 'weights must be finite'}]
  assert 'lingvo_moe_requests_total{path="/generate",status="200"} 2.0' in metrics


@pytest.mark.parametrize('stream', [True, False])
def test_the_work_for_a_client_that_goes_away_ends(stream):
  async def test(client, run, app):
    asked = asyncio.create_task(client.post('/generate', json={'prompt': 'x', 'stream': stream}))
    while run.drawn < 3:
      await asyncio.sleep(0.01)
    if stream:
      (await asked).close()
    asked.cancel()
    while app.in_flight:
      await asyncio.sleep(0.01)
    after = await client.post('/generate', json={'prompt': 'y', 'max_new_tokens': 1})
    return await after.json(), run.drawn

  answer, drawn = test_http.with_client(test, Stub(0.02))
  assert answer['text'] == 'a' and drawn < 100  # of 500
