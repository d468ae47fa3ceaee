"""The page of the server in a real browser, over a model that translates word by word."""

import asyncio
import contextlib
import json
import re
import threading
import time

import pytest

pytest.importorskip('aiohttp')
pytest.importorskip('prometheus_client')

from browser import CONTROL, Browser
from served_stub import Hypothesis, Stub

from lingvo_moe.addons.serving import server
from lingvo_moe.addons.serving.connections import Connections
from lingvo_moe.addons.serving.http_app import HttpApp
from lingvo_moe.core.alignment import Alignment, Token
from lingvo_moe.text.translator import Answers

ENGLISH = {'ein': 'a', 'hund': 'dog', 'läuft': 'runs', 'weg': 'away', 'der': 'the', 'مرحبا': 'hello'}
RESULT, STATUS = "document.getElementById('result').textContent", "document.getElementById('status').textContent"


class Words(Stub):
  """A model that translates word by word, and the last two words of a line of four as one; `lines` it was asked for."""

  def __init__(self, able=('alignments',)):
    super().__init__(pairs=(('de', 'en'), ('ar', 'en')))
    self.able, self.lines = able, []

  def answer_parts(self, lines, asked):
    self.lines += lines
    self.go.wait(10)
    return Answers([[self._best(line, asked), *self._others(line, asked)] for line in lines], [])

  def _best(self, line, asked):
    source = [Token(found[0], found.start(), found.end()) for found in re.finditer(r'\w+|[^\w\s]', line)]
    text, target, points = '', [], []
    for i, token in enumerate(source):
      word = ENGLISH.get(token.piece.lower(), token.piece)
      text += ' ' * bool(text and word.isalnum())
      target.append(Token(word, len(text), len(text) + len(word)))
      points += [(i, i)] + [(i - 1, i)] * (word == 'away')
      text += word
    return Hypothesis(text, 0.0, 0.0, Alignment(source, target, points) if asked.request.alignments else None)

  def _others(self, line, asked):
    return [Hypothesis(f'{self._best(line, asked).text} ({i})') for i in range(1, asked.n_best)]


@contextlib.contextmanager
def served(run):
  """URL of a server of a run, in a thread."""
  loop, started = asyncio.new_event_loop(), threading.Event()

  async def serve():
    app, bound = HttpApp(run, wait=0.0), server.bind('127.0.0.1', 0)
    connections = Connections(app.answer, app.malformed)
    accepting = asyncio.create_task(connections.accept(bound))
    state.update(url=server.url(bound), end=asyncio.Event())
    started.set()
    await state['end'].wait()
    run.go.set()
    accepting.cancel()
    await connections.close(1)
    await asyncio.to_thread(app.batcher.close)

  state = {}
  thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
  thread.start()
  started.wait(10)
  try:
    yield state['url']
  finally:
    loop.call_soon_threadsafe(state['end'].set)
    thread.join(20)
    loop.close()


@pytest.fixture
def page(tmp_path):
  """(browser at the page, run)."""
  run = Words()
  with served(run) as url, Browser(tmp_path / 'profile') as browser:
    browser.open(url)
    browser.until("document.getElementById('target').options.length")
    browser.js("document.getElementById('source').value = 'de'")  # detection takes seconds to load
    yield browser, run


def drop(browser, name, text):
  """Drops a file on the page."""
  browser.js(
    f'(() => {{ const data = new DataTransfer(); data.items.add(new File([{json.dumps(text)}], {json.dumps(name)}));'
    "for (const kind of ['dragover', 'drop']) document.body.dispatchEvent("
    'new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true})); })()'
  )


def test_text_is_translated_while_it_is_typed_and_the_last_request_wins(page):
  browser, run = page
  assert browser.js('document.activeElement.id') == 'q'
  browser.type('Ein Hund')
  browser.until(f"{RESULT} === 'a dog'")
  run.go.clear()
  browser.type(' läuft')
  browser.until(f"{STATUS} === 'Working.'")
  while 'Ein Hund läuft' not in run.lines:
    time.sleep(0.02)
  browser.type(' weg')
  time.sleep(0.6)  # until the second is asked for too
  run.go.set()
  browser.until(f"{RESULT} === 'a dog runs away'")
  time.sleep(0.3)
  assert browser.js(RESULT) == 'a dog runs away' and not browser.errors


def test_a_burst_of_keys_asks_once(page):
  browser, run = page
  for letter in 'Hund':
    browser.type(letter)
  browser.until(f"{RESULT} === 'dog'")
  assert run.lines == ['Hund']


def test_the_keyboard_alone_translates_stops_and_reads_words(page):
  browser, run = page
  browser.type('der Hund')
  browser.press('Enter', CONTROL)
  browser.until(f"{RESULT} === 'the dog'")
  run.go.clear()
  browser.type(' läuft weg')
  browser.press('Enter', CONTROL)
  browser.until(f"{STATUS} === 'Working.'")
  browser.press('Escape')
  browser.until(f"{STATUS}.startsWith('Stopped.')")
  run.go.set()
  browser.press('Enter', CONTROL)
  browser.until(f"{RESULT} === 'the dog runs away'")
  for _ in range(12):
    browser.press('Tab')
    if browser.js('document.activeElement.id') == 'result':
      break
  browser.until("document.querySelectorAll('#result span').length === 4")
  words = []
  for _ in range(4):
    browser.press('ArrowRight')
    words.append(browser.text('#word'))
  assert words == ['the ← der', 'dog ← Hund', 'runs ← läuft', 'away ← läuft weg']
  browser.press('ArrowLeft')
  assert browser.text('#word') == 'runs ← läuft' and browser.text('#result mark') == 'runs'
  assert browser.js(RESULT) == 'the dog runs away'


def test_the_word_under_the_pointer_shows_its_source(page):
  browser, run = page
  browser.type('🐕 der Hund!\nein Hund')
  browser.until(f"{RESULT} === '🐕 the dog!\\na dog'")
  left, top, *_ = browser.box('#result')
  browser.point(left + 5, top + 5)
  browser.until("document.querySelectorAll('#result span').length === 5")
  left, top, width, height = browser.box('#result span:nth-of-type(3)')
  browser.point(left + width / 2, top + height / 2)
  assert browser.text('#word') == 'dog! ← Hund!'
  assert run.lines.count('ein Hund') == 2  # once for the words


def test_a_model_without_alignments_offers_no_words(tmp_path):
  with served(Words(able=())) as url, Browser(tmp_path / 'profile') as browser:
    browser.open(url)
    browser.until("document.getElementById('target').options.length")
    browser.js("document.getElementById('source').value = 'de'")
    browser.type('Hund')
    browser.until(f"{RESULT} === 'dog'")
    browser.js("document.getElementById('result').focus()")
    browser.press('ArrowRight')
    assert browser.text('#word') == '' and browser.js("document.getElementById('hint').hidden")


def test_alternatives_are_listed_and_counts_are_shown_against_the_limit(page):
  browser, _ = page
  browser.js("document.getElementById('alternatives').value = '2'")
  browser.type('Hund')
  browser.until(f"{RESULT} === 'dog'")
  assert browser.js("[...document.querySelectorAll('#others li')].map(li => li.textContent)") == ['dog (1)', 'dog (2)']
  assert browser.text('#count') == '4 characters'
  browser.js(
    "document.getElementById('q').value = 'ä'.repeat(600000);"
    "document.getElementById('q').dispatchEvent(new Event('input'))"
  )
  assert browser.text('#count') == '600,000 characters, at most 1024 KiB'
  assert browser.js("document.getElementById('button').disabled")


def test_a_dropped_file_comes_back_translated_and_one_that_is_none_is_refused(page):
  browser, _ = page
  drop(browser, 'brief.txt', 'der Hund\nläuft')
  browser.until("!document.getElementById('fetch').hidden")
  assert browser.text('#link') == 'Save the translation of brief.txt'
  assert browser.js("fetch(document.getElementById('link').href).then(r => r.text())") == 'the dog\nruns'
  drop(browser, 'brief.pdf', 'der Hund')
  browser.until(f"{STATUS}.startsWith('Error: ')")
  assert 'pdf' in browser.js(STATUS)


def test_arabic_stands_on_the_right_and_swapping_takes_languages_and_texts(page):
  browser, _ = page
  browser.js("document.getElementById('source').value = 'ar'")
  browser.type('مرحبا')
  browser.until(f"{RESULT} === 'hello'")
  direction = 'getComputedStyle(document.getElementById("%s")).direction'
  assert browser.js(direction % 'q') == 'rtl' and browser.js(direction % 'result') == 'ltr'
  browser.js("document.getElementById('swap').click()")
  assert browser.js("document.getElementById('q').value") == 'hello'


def test_what_is_said_of_the_model_is_for_a_visitor(page):
  browser, _ = page
  assert browser.text('#about') == 'From Arabic, German into English. A machine translates; check what matters.'
  assert 'step' not in browser.js('document.body.innerText')


@pytest.mark.parametrize('dark', [False, True])
@pytest.mark.parametrize('width', [400, 1280])
def test_the_page_fits_a_phone_and_a_desktop_in_light_and_dark(page, dark, width):
  browser, _ = page
  browser.show(width, 900, dark)
  browser.type('der Hund läuft weg ' * 20)
  browser.until(f'{RESULT}.length > 100')
  assert browser.js('document.documentElement.scrollWidth') <= width
  (left, top, *_), (other_left, other_top, *_) = browser.box('#q'), browser.box('#result')
  assert (top == other_top and left < other_left) if width == 1280 else (left == other_left and top < other_top)
  colours = browser.js('[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]')
  brightness = [sum(map(int, re.findall(r'\d+', colour)[:3])) for colour in colours]
  assert (brightness[0] < 150 < 600 < brightness[1]) if dark else (brightness[1] < 150 < 600 < brightness[0])


def test_without_javascript_the_page_says_how_to_ask_and_shows_no_dead_controls(tmp_path):
  with served(Words()) as url, Browser(tmp_path / 'profile', javascript=False) as browser:
    browser.call('Page.navigate', url=url)
    time.sleep(1)
    tree = browser.call('Accessibility.getFullAXTree')['nodes']
    said = [node['name']['value'] for node in tree if node.get('name', {}).get('value')]
    assert any('This page needs JavaScript' in text for text in said)
    assert not any(node.get('role', {}).get('value') in ('textbox', 'button') for node in tree)
