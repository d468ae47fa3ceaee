"""The job serve: what it refuses before it loads, how it drains, and a trained run behind it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request

import pytest

pytest.importorskip('aiohttp')
pytest.importorskip('prometheus_client')

import aiohttp

import lingvo_moe
from lingvo_moe import serve
from lingvo_moe.addons.serving import server
from lingvo_moe.addons.serving.http_app import HttpApp
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.task import Answers, Hypothesis
from lingvo_moe.text.sentences import Plan


class Stub:
  """A run that answers when it may."""

  model, checkpoint, over_the_length = 'toy.Stub', 'step 1', 'over the length'
  beam_size = 1
  continues_text = False
  path = 'runs/stub'

  def __init__(self):
    self.go, self.began = threading.Event(), threading.Event()

  def pairs(self):
    return []

  targets = pairs

  def choose_target(self, requested, source=None):
    return None

  def plan(self, lines, asked):
    return Plan.of_whole(lines)

  def answer_parts(self, lines, asked):
    self.began.set()
    assert self.go.wait(30)
    return Answers([[Hypothesis(line.upper(), 0.0, 0.0)] for line in lines], [])


def drained(release_after, drain_seconds=20.0):
  """Serves a stub, sends SIGTERM while requests wait: (whether it drained, their answers, a new one's error)."""
  run = Stub()

  async def go():
    app, bound = HttpApp(run, wait=0.0), server.bind('127.0.0.1', 0)
    started = asyncio.Event()
    serving = asyncio.create_task(server.serve(app, bound, drain_seconds, started.set))
    await asyncio.wait_for(started.wait(), 20)
    url = server.url(bound)
    async with aiohttp.ClientSession() as session:

      async def post(text):
        async with session.post(f'{url}/translate', json={'q': text}) as response:
          return (await response.json())['translatedText']

      posts = [asyncio.create_task(post(text)) for text in ('first', 'second', 'third')]
      await asyncio.to_thread(run.began.wait, 20)
      while app.in_flight < 3:
        await asyncio.sleep(0.001)
      os.kill(os.getpid(), signal.SIGTERM)
      while not app.draining:
        await asyncio.sleep(0.001)
      await asyncio.sleep(0.05)
      with pytest.raises(aiohttp.ClientConnectorError):
        await post('late')
      asyncio.get_running_loop().call_later(release_after, run.go.set)
      answers = await asyncio.gather(*posts, return_exceptions=True)
      return await asyncio.wait_for(serving, 30), answers

  try:
    return asyncio.run(asyncio.wait_for(go(), 120))
  finally:
    run.go.set()


def test_sigterm_answers_what_was_accepted_and_accepts_no_more():
  assert drained(release_after=0.2) == (True, ['FIRST', 'SECOND', 'THIRD'])


def test_draining_ends_after_its_seconds_and_says_so(monkeypatch):
  monkeypatch.setattr(server, '_SEND_SECONDS', 0.1)
  ended, answers = drained(release_after=20.0, drain_seconds=0.1)
  assert not ended and all(isinstance(answer, aiohttp.ClientError) for answer in answers)


BUSY = """
import sys, types
from lingvo_moe import serve
from lingvo_moe.addons.serving import server
from lingvo_moe.text.sentences import Plan

def load(options):
  import tensorflow as tf

  @tf.function
  def work():
    return tf.while_loop(lambda i, x: i < 10**6, lambda i, x: (i + 1, tf.nn.softmax(x @ x)), (0, tf.ones([200, 200])))

  class Run:
    path = model = checkpoint = over_the_length = 'stub'
    beam_size = 1
    continues_text = False
    pairs = targets = lambda self: []
    choose_target = lambda self, requested, source=None: None

    plan = lambda self, lines, *key: Plan.of_whole(lines)

    def answer_parts(self, lines, asked):
      print('working', flush=True)
      work()

  return Run()

server._SEND_SECONDS = 0.1
serve.load = load
serve.main()
"""


def test_a_server_whose_time_to_drain_is_over_ends_with_1_while_tensorflow_computes():
  command = [sys.executable, '-c', BUSY, 'runs/stub', '--port=0', '--drain_seconds=0.2']
  process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  end = threading.Timer(120, process.kill)  # lets a test that would wait for ever fail
  end.start()
  try:
    url = re.search(r'serving .* on (http://\S+)', process.stderr.readline())[1]
    request = urllib.request.Request(f'{url}/translate', b'{"q": "1"}', {'Content-Type': 'application/json'})
    rebound = urllib.request.Request(f'{url}/health', headers={'Host': 'evil.example'})
    with pytest.raises(urllib.error.HTTPError, match='403'):  # as it is bound to a loopback address
      urllib.request.urlopen(rebound, timeout=60)
    threading.Thread(target=_quietly, args=[request], daemon=True).start()
    assert process.stdout.readline() == 'working\n'
    process.send_signal(signal.SIGTERM)
    said = process.stderr.read()
    assert (process.wait(), said) == (1, 'ended after --drain_seconds=0.2 with requests that were not answered\n')
  finally:
    end.cancel()
    process.kill()
    process.communicate()


def _quietly(request):
  with contextlib.suppress(OSError):
    urllib.request.urlopen(request, timeout=60)


def test_a_taken_port_is_one_clear_line():
  with server.bind('127.0.0.1', 0) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f'port {port} of 127.0.0.1 is taken: use another --port'):
      server.bind('127.0.0.1', port)
    with pytest.raises(UserError, match='is taken'):  # before the run is even looked at
      serve.serve(serve.Options('runs/nothing', port=port))
  with pytest.raises(UserError, match='cannot listen on --host=no.such.host.invalid --port=0'):
    server.bind('no.such.host.invalid', 0)


def test_what_is_no_origin_is_refused_before_the_run_is_looked_at():
  with pytest.raises(UserError, match='--cors has origins'):
    serve.serve(serve.Options('runs/nothing', port=0, cors=['my.site']))


def test_addresses_of_ipv6_are_in_brackets():
  bound = types.SimpleNamespace(getsockname=lambda: ('::1', 5000, 0, 0))
  assert server.url(bound) == 'http://[::1]:5000'


def test_a_missing_extra_names_the_line_to_type(monkeypatch):
  monkeypatch.setitem(sys.modules, 'prometheus_client', None)
  with pytest.raises(UserError, match=r'serving needs prometheus_client, which is not installed .*: pip install \S'):
    serve.require_extra()


def test_the_run_is_loaded_as_translate_does_and_is_warm(toy_run):
  run = serve.load(serve.Options(toy_run.path))
  assert run.step == 250 and list(run._made) == [('translator', 1)]


def post(url, query):
  body = json.dumps(query).encode()
  request = urllib.request.Request(f'{url}/translate', body, {'Content-Type': 'application/json'})
  with urllib.request.urlopen(request, timeout=60) as response:
    return json.loads(response.read())


@pytest.mark.slow
def test_the_command_serves_a_run_until_sigterm(toy_run):
  command = [sys.executable, '-m', 'lingvo_moe.serve', toy_run.path]
  env = {name: value for name, value in os.environ.items() if not name.startswith('TF_')}
  with subprocess.Popen([*command, '--port=0'], stderr=subprocess.PIPE, env=env, text=True) as process:
    line = process.stderr.readline()  # the first: TensorFlow is quiet
    assert line.startswith(f'serving {toy_run.path} (mt.cldr.Tiny, step 250, the best by dev loss')
    url = line.split(' on ')[1].strip()
    sentences = ['Ein Hund läuft.', '', 'Zwei Kinder schlafen.', 'Hund ' * 60]
    answer = post(url, {'q': sentences, 'source': 'de', 'target': 'en'})
    assert answer['warnings'] == ['q[3] has a sentence over max_length=32 tokens, which was cut where a clause ends']
    with pytest.warns(UserWarning):
      assert answer['translatedText'] == lingvo_moe.load(toy_run.path).translate(sentences)
    with pytest.raises(urllib.error.HTTPError) as refused:
      post(url, {'q': 'a', 'source': 'fr'})
    assert json.loads(refused.value.read()) == {'error': 'fr is not a source language of this model; it has de'}

    port = url.rpartition(':')[2]
    second = subprocess.run([*command, f'--port={port}'], capture_output=True, text=True, timeout=120)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1].startswith(f'error: port {port} of 127.0.0.1 is taken')
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and process.stderr.read() == ''
  with pytest.raises(OSError):
    socket.create_connection(('127.0.0.1', int(port)), timeout=5)
