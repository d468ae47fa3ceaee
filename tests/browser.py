"""Chromium, driven over its DevTools pipe, for tests of pages; tests are skipped where there is no Chromium."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time

import pytest

NAME = next(filter(shutil.which, ('chromium', 'chromium-browser', 'google-chrome')), None)
KEYS = {'Enter': 13, 'Escape': 27, 'Tab': 9, 'ArrowLeft': 37, 'ArrowUp': 38, 'ArrowRight': 39, 'ArrowDown': 40}
KEYS |= {'End': 35, 'Home': 36}
CONTROL = 2  # modifier of a key
_WAIT = 20.0  # seconds


class Browser:
  """One page in a headless browser; a context manager.

  Args:
    profile: folder for the browser's own files.
    javascript: whether pages may run scripts.
  """

  def __init__(self, profile, javascript=True):
    if not NAME:
      pytest.skip('there is no Chromium here')
    to_browser, from_browser = os.pipe(), os.pipe()
    flags = '--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe'
    script = f'exec {NAME} {flags} --user-data-dir="$1" about:blank 3<&{to_browser[0]} 4>&{from_browser[1]}'
    self._process = subprocess.Popen(
      ['bash', '-c', script, 'browser', str(profile)],
      pass_fds=(to_browser[0], from_browser[1]),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    self._to, self._from = os.fdopen(to_browser[1], 'wb', 0), os.fdopen(from_browser[0], 'rb', 0)
    self._numbers, self._read, self._session = itertools.count(), b'', None
    self.errors = []  # of the page's scripts, and what its policy refused
    target = self.call('Target.createTarget', url='about:blank')['targetId']
    self._session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self.call(f'{domain}.enable')
    self.call('Emulation.setScriptExecutionDisabled', value=not javascript)
    self.show()

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    self._process.kill()
    self._process.wait()
    self._to.close()
    self._from.close()

  def call(self, method, **parameters):
    """Result of a method of the DevTools protocol."""
    number = next(self._numbers)
    session = {'sessionId': self._session} if self._session else {}
    self._to.write(json.dumps({'id': number, 'method': method, 'params': parameters, **session}).encode() + b'\0')
    while (message := self._message()).get('id') != number:
      if message.get('method') == 'Runtime.exceptionThrown':
        self.errors.append(message['params']['exceptionDetails'])
      if message.get('method') == 'Log.entryAdded' and message['params']['entry']['level'] == 'error':
        self.errors.append(message['params']['entry']['text'])
    assert 'error' not in message, message
    return message['result']

  def _message(self):
    while b'\0' not in self._read:
      more = self._from.read(1 << 16)
      assert more, 'the browser has ended'
      self._read += more
    first, _, self._read = self._read.partition(b'\0')
    return json.loads(first)

  def open(self, url):
    self.call('Page.navigate', url=url)
    self.until("document.readyState === 'complete'") if self.runs_scripts() else time.sleep(1)

  def runs_scripts(self):
    return self.js('1 + 1') == 2

  def js(self, expression):
    """Value of an expression of JavaScript in the page; a promise is awaited."""
    found = self.call('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
    assert 'exceptionDetails' not in found, found
    return found['result'].get('value')

  def until(self, expression):
    """Waits until an expression is true, and returns its value."""
    end = time.monotonic() + _WAIT
    while not (value := self.js(expression)):
      assert time.monotonic() < end, f'{expression} is {value!r} after {_WAIT} seconds; errors: {self.errors}'
      time.sleep(0.02)
    return value

  def text(self, selector):
    return self.js(f'document.querySelector({json.dumps(selector)}).textContent')

  def type(self, text):
    """Types a text where the focus is."""
    self.call('Input.insertText', text=text)

  def press(self, key, modifiers=0):
    """Presses a key of KEYS, or a letter."""
    code = KEYS.get(key) or ord(key.upper())
    more = {'text': '\r'} if key == 'Enter' and not modifiers else {}
    common = {'key': key, 'code': key, 'windowsVirtualKeyCode': code, 'modifiers': modifiers}
    self.call('Input.dispatchKeyEvent', type='keyDown', **common, **more)
    self.call('Input.dispatchKeyEvent', type='keyUp', **common)

  def point(self, x, y, kind='mouseMoved', **more):
    """Moves the pointer to a place of the window; 'mousePressed' and 'mouseReleased' click."""
    self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, **more)

  def box(self, selector):
    """(left, top, width, height) of the first element of a selector, in the window."""
    script = '(r => [r.x, r.y, r.width, r.height])(document.querySelector(%s).getBoundingClientRect())'
    return self.js(script % json.dumps(selector))

  def show(self, width=1280, height=900, dark=False):
    """Sets the window's size and the system's colours."""
    self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)
    scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
    self.call('Emulation.setEmulatedMedia', features=[scheme])

  def picture(self, path, whole=False):
    """Writes a PNG of the window, or of the whole page."""
    data = self.call('Page.captureScreenshot', captureBeyondViewport=whole)['data']
    path.write_bytes(base64.b64decode(data))
