"""HTTP interface of a run: a handler of requests whose /translate is LibreTranslate's."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import time
import traceback
from typing import Any

import babel
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.text_model import Answers, Languages, TextModel
from lingvo_moe.serving import metrics as metrics_lib
from lingvo_moe.serving import page
from lingvo_moe.serving import query as query_lib
from lingvo_moe.serving.batching import Batcher, QueueFullError
from lingvo_moe.serving.origins import Origins
from lingvo_moe.serving.query import BadQueryError

_PATHS = ('/', '/translate', '/languages', '/health', '/metrics')
_BODY_SECONDS = 30  # for a client to send a body
_TRIM_SECONDS = 60.0


class HttpApp:
  """Handlers for one run.

  Args:
    run: the run.
    max_body: bytes of a request's body, after it is decompressed.
    origins: which hosts and origins are answered.
    **batching: options of Batcher.

  Attributes:
    draining: whether new translations are refused, and those that were accepted are answered.
    in_flight: number of requests that are being answered.
    batcher: thread that translates.
  """

  def __init__(self, run: TextModel, *, max_body: int = 1 << 20, origins: Origins | None = None, **batching: Any):
    self.draining = False
    self.in_flight = 0
    self._run = run
    self._max_body = max_body
    self._origins = origins or Origins()
    self._languages = _Languages(run)
    self._trimmed = time.monotonic()
    self.batcher = Batcher(lambda lines, key: run.answer(lines, *key), observe=self._after_batch, **batching)
    self._metrics = metrics_lib.Metrics(lambda: self.batcher.waiting, run.model, run.checkpoint)
    self._gets = {
      '/': lambda: web.Response(text=page.HTML, content_type='text/html', headers=page.HEADERS),
      '/languages': lambda: web.json_response(self._languages.listed),
      '/health': self._health,
      '/metrics': lambda: web.Response(body=self._metrics.text(), headers={'Content-Type': metrics_lib.CONTENT_TYPE}),
    }

  def _after_batch(self, lines: int, seconds: float) -> None:
    self._metrics.batch_lines.observe(lines)
    self._metrics.batch_seconds.observe(seconds)
    if time.monotonic() >= self._trimmed + _TRIM_SECONDS:
      self._trimmed = time.monotonic()
      _trim_memory()

  async def answer(self, request: web.BaseRequest) -> web.Response:
    """Answers a request, and counts it; errors are JSON."""
    begin = time.monotonic()
    self.in_flight += 1
    status = metrics_lib.HUNG_UP  # what is raised below all is asyncio.CancelledError
    try:
      response = await self._guarded(request)
      response.headers.update(self._origins.headers(request.headers))
      status = response.status
      if self.draining or not request.content.is_eof():
        response.force_close()
      return response
    finally:
      self.in_flight -= 1
      path = request.path if request.path in _PATHS else 'other'
      self._metrics.request(path, status, time.monotonic() - begin)

  def malformed(self, status: int, why: str) -> web.Response:
    """Answers what is no HTTP request, and counts it."""
    self._metrics.request('other', status, 0.0)
    return _error(status, why)

  async def _guarded(self, request: web.BaseRequest) -> web.Response:
    try:
      return await self._routed(request)
    except BadQueryError as e:
      return _error(e.status, str(e))
    except QueueFullError as e:
      return _error(503, str(e), {'Retry-After': str(e.retry_after)})
    except ConnectionError:  # the client left while it sent the body
      return _error(metrics_lib.HUNG_UP, 'the client left')
    except UserError as e:
      return _error(500, str(e))
    except Exception:
      traceback.print_exc(file=sys.stderr)
      return _error(500, 'internal error; the log of the server has it')

  async def _routed(self, request: web.BaseRequest) -> web.Response:
    if refusal := self._origins.refusal(request.headers):
      return _error(403, refusal)
    if request.path not in _PATHS:
      return _error(404, f'no such path; there are {", ".join(_PATHS)}')
    is_translate = request.path == '/translate'
    methods = ['POST', 'OPTIONS'] if is_translate else ['GET', 'HEAD', 'OPTIONS']
    allow = {'Allow': ', '.join(methods)}
    if request.method not in methods:
      return _error(405, f'{request.path} takes {allow["Allow"]}; not {request.method:.20}', allow)
    if request.method == 'OPTIONS':
      return web.Response(status=204, headers=allow)
    return await self._translate(request) if is_translate else self._gets[request.path]()

  def _health(self) -> web.Response:
    state = {
      'status': 'draining' if self.draining else 'ok',
      'model': self._run.model,
      'checkpoint': self._run.checkpoint,
      'waiting_lines': self.batcher.waiting,
    }
    return web.json_response(state, status=503 if self.draining else 200)

  async def _translate(self, request: web.BaseRequest) -> web.Response:
    if self.draining:
      return _error(503, 'the server is about to end', {'Retry-After': '5'})
    body, content_type = await self._body(request), request.headers.get('Content-Type', '')
    query = query_lib.parse(body, content_type, request.rel_url.raw_query_string)
    try:
      tag = self._languages.choose(query.source, query.target)
    except UserError as e:
      raise BadQueryError(str(e)) from None
    most = self._run.beam_size - 1
    if query.alternatives > most:
      raise BadQueryError(f'alternatives must be at most {most}, the beam less one')
    lines = [line for text in query.texts for line in text]
    if len(lines) > self.batcher.max_waiting:
      return _error(413, f'q has {len(lines)} lines; at most {self.batcher.max_waiting} are taken at once')
    # The whole beam for any number of alternatives, so that one more program is compiled and they share batches.
    n_best = self._run.beam_size if query.alternatives else 1
    source = query.source if self._languages.has_several_sources else None
    future = self.batcher.submit(lines, (tag, n_best, source))
    answer = await asyncio.wrap_future(future)  # cancelled with this handler when the client hangs up
    self._metrics.truncated.inc(len(answer.truncated))
    return web.json_response(_result(query, answer, self._run.over_the_length))

  async def _body(self, request: web.BaseRequest) -> bytes:
    too_large = BadQueryError(f'a body has at most {self._max_body} bytes: send fewer lines at once', 413)
    if (request.content_length or 0) > self._max_body:
      raise too_large
    if request.version == HttpVersion11 and request.headers.get('Expect', '').lower() == '100-continue':
      await request.writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
    body = bytearray()
    try:
      async with asyncio.timeout(_BODY_SECONDS):
        async for chunk in request.content.iter_any():
          body += chunk
          if len(body) > self._max_body:
            raise too_large
    except TimeoutError:
      raise BadQueryError(f'the body took more than {_BODY_SECONDS} seconds to come', 408) from None
    except (web.RequestPayloadError, HttpProcessingError):
      encoding = request.headers.get('Content-Encoding')
      said = f'{encoding:.40}, as its Content-Encoding says' if encoding else 'as long as its header says'
      raise BadQueryError(f'the body is not {said}') from None
    return bytes(body)


class _Languages:
  """Languages of a run.

  Where neither its log nor a corpus says which there are, any source is taken by a model that does not read its code.

  Attributes:
    listed: each language, with its name in English and the languages that it is translated into, as LibreTranslate has
      it.
  """

  def __init__(self, run: TextModel):
    self._run = run
    pairs, names = run.pairs(), babel.Locale('en').languages
    self._known = {'source': {source for source, _ in pairs}, 'target': {target for _, target in pairs}}
    self.has_several_sources = len(self._known['source']) > 1
    self.listed: list[dict[str, Any]] = [
      {'code': code, 'name': names.get(code, code), 'targets': [target for source, target in pairs if source == code]}
      for code in sorted(self._known['source'] | self._known['target'])
    ]
    try:
      run.choose_target(None)
      self._must_choose = False
    except UserError:
      self._must_choose = True

  def choose(self, source: str | None, target: str | None) -> Languages:
    """Languages to pass to TextModel.answer; UserError names the languages there are."""
    for role, code in (('source', source), ('target', target)):
      if code is not None and self._known[role] and code not in self._known[role]:
        known = ', '.join(sorted(self._known[role]))
        raise UserError(f'{code:.40} is not a {role} language of this model; it has {known}')
    if self._must_choose and target is None:
      known = ', '.join(sorted(self._known['target'])) or 'none that is known'
      raise UserError(f'target must be given; one of {known}')
    return self._run.choose_target(target if self._must_choose else None, source)


def _trim_memory() -> None:
  """Gives free memory back to the system, where the C library can.

  Batches of all shapes leave free pieces in the heaps of TensorFlow's threads, which otherwise grow slowly for hours.
  """
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL('libc.so.6').malloc_trim(0)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
  return web.json_response({'error': message}, status=status, headers=headers)


def _result(query: query_lib.Query, answer: Answers, over_the_length: str) -> dict[str, Any]:
  """The answer as LibreTranslate has it; with 'warnings' where a line is over the length."""
  texts: list[list[str]] = []  # of each text, its translation and the alternatives
  warnings, first, notices = [], 0, sorted(answer.notices(over_the_length))
  for number, text in enumerate(query.texts):
    count = len(text)
    lines = answer.hypotheses[first : first + count]
    ranks = range(min(1 + query.alternatives, max(map(len, lines))))
    texts.append(['\n'.join(line[min(rank, len(line) - 1)].text for line in lines) for rank in ranks])
    where = f'q[{number}]' if query.is_list else 'q'
    for i, what in notices:
      if first <= i < first + count:
        warnings.append(f'line {i - first + 1} of {where} {what}' if count > 1 else f'{where} {what}')
    first += count
  best, alternatives = [ranked[0] for ranked in texts], [ranked[1:] for ranked in texts]
  result: dict[str, Any] = {'translatedText': best if query.is_list else best[0]}
  if query.alternatives:
    result['alternatives'] = alternatives if query.is_list else alternatives[0]
  return {**result, **({'warnings': warnings} if warnings else {})}
