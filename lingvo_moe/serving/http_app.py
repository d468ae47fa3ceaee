"""HTTP interface of a run: an aiohttp application whose /translate is LibreTranslate's."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from lingvo_moe.core.errors import UserError
from lingvo_moe.run.loaded import LoadedRun
from lingvo_moe.serving import metrics as metrics_lib
from lingvo_moe.serving import page
from lingvo_moe.serving import query as query_lib
from lingvo_moe.serving.batching import Answer
from lingvo_moe.serving.batching import Batcher
from lingvo_moe.serving.batching import QueueFullError
from lingvo_moe.serving.languages import Languages
from lingvo_moe.serving.memory import Trimmer

_BODY_SECONDS = 30  # for a client to send a body


class HttpApp:
  """Handlers for one run.

  Args:
    run: the run.
    max_batch_lines: see Batcher.
    batch_wait: see Batcher.
    max_waiting: see Batcher.
    max_body: bytes of a request's body.

  Attributes:
    draining: whether new translations are refused, and those that were accepted are answered.
    in_flight: number of requests that are being answered.
    batcher: thread that translates.
  """

  def __init__(
    self,
    run: LoadedRun,
    *,
    max_batch_lines: int = 64,
    batch_wait: float = 0.005,
    max_waiting: int = 1000,
    max_body: int = 1 << 20,
  ):
    self.draining = False
    self.in_flight = 0
    self._run = run
    self._max_body = max_body
    self._trim = Trimmer()
    self._languages = Languages(run)
    self.batcher = Batcher(
      lambda lines, key: run.answer(lines, *key),
      max_lines=max_batch_lines,
      wait=batch_wait,
      max_waiting=max_waiting,
      observe=self._after_batch,
    )
    self._metrics = metrics_lib.Metrics(lambda: self.batcher.waiting, run.model, run.checkpoint)

  def _after_batch(self, lines: int, seconds: float) -> None:
    self._metrics.batch(lines, seconds)
    self._trim()

  def application(self) -> web.Application:
    app = web.Application(client_max_size=self._max_body, middlewares=[self._answered])
    app.add_routes(
      [
        web.get('/', self.page),
        web.post('/translate', self.translate),
        web.get('/languages', self.languages),
        web.get('/health', self.health),
        web.get('/metrics', self.metrics),
      ]
    )
    return app

  async def page(self, request: web.Request) -> web.Response:
    del request
    return web.Response(text=page.HTML, content_type='text/html', headers=page.HEADERS)

  async def languages(self, request: web.Request) -> web.Response:
    del request
    return web.json_response(self._languages.listed)

  async def health(self, request: web.Request) -> web.Response:
    del request
    found = {
      'status': 'draining' if self.draining else 'ok',
      'model': self._run.model,
      'checkpoint': self._run.checkpoint,
      'waiting_lines': self.batcher.waiting,
    }
    return web.json_response(found, status=503 if self.draining else 200)

  async def metrics(self, request: web.Request) -> web.Response:
    del request
    return web.Response(body=self._metrics.text(), headers={'Content-Type': metrics_lib.CONTENT_TYPE})

  async def translate(self, request: web.Request) -> web.Response:
    if self.draining:
      return _error(503, 'the server is about to end', {'Retry-After': '5'})
    try:
      query = query_lib.parse(await self._body(request), request.content_type)
      tag = self._languages.choose(query.source, query.target)
      most = self._run.config.beam_size - 1
      if query.alternatives > most:
        raise UserError(f'alternatives must be at most {most}, the beam less one')
    except (query_lib.BadQueryError, UserError) as e:
      return _error(400, str(e))
    lines = query.lines
    if len(lines) > self.batcher.max_waiting:
      return _error(413, f'q has {len(lines)} lines; at most {self.batcher.max_waiting} are taken at once')
    try:
      # The whole beam for any number of alternatives, so that one more program is compiled and they share batches.
      n_best = self._run.config.beam_size if query.alternatives else 1
      future = self.batcher.submit(lines, (tag, n_best))
    except QueueFullError as e:
      return _error(503, str(e), {'Retry-After': str(e.retry_after)})
    answer = await asyncio.wrap_future(future)  # cancelled with this handler when the client hangs up
    self._metrics.truncated(len(answer.truncated))
    return web.json_response(_result(query, answer, self._run.over_the_length))

  async def _body(self, request: web.Request) -> bytes:
    if request.content_length is not None and request.content_length > self._max_body:
      raise web.HTTPRequestEntityTooLarge(self._max_body, request.content_length)
    try:
      async with asyncio.timeout(_BODY_SECONDS):
        return await request.read()
    except TimeoutError:
      raise web.HTTPRequestTimeout() from None

  @web.middleware
  async def _answered(
    self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
  ) -> web.StreamResponse:
    """Calls a handler, turns errors into JSON, and counts the request."""
    begin = time.monotonic()
    self.in_flight += 1
    status = metrics_lib.HUNG_UP  # what is raised below all is asyncio.CancelledError
    try:
      response = await self._guarded(request, handler)
      status = response.status
      if self.draining:
        response.force_close()
      return response
    finally:
      self.in_flight -= 1
      resource = request.match_info.route.resource
      path = resource.canonical if resource is not None else 'other'
      self._metrics.request(path, status, time.monotonic() - begin)

  async def _guarded(self, request, handler) -> web.StreamResponse:
    try:
      return await handler(request)
    except web.HTTPRequestEntityTooLarge:
      return _error(413, f'a body has at most {self._max_body} bytes: send fewer lines at once')
    except web.HTTPException as e:
      return _error(e.status, e.reason, {name: e.headers[name] for name in ('Allow',) if name in e.headers})
    except ConnectionError:  # the client left while it sent the body
      return _error(metrics_lib.HUNG_UP, 'the client left')
    except UserError as e:
      return _error(500, str(e))
    except Exception:
      traceback.print_exc(file=sys.stderr)
      return _error(500, 'internal error; the log of the server has it')


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
  return web.json_response({'error': message}, status=status, headers=headers)


def _result(query: query_lib.Query, answer: Answer, over_the_length: str) -> dict[str, Any]:
  """The answer as LibreTranslate has it; with 'warnings' where a line was translated in part."""
  texts: list[list[str]] = []  # of each text, its translation and the alternatives
  warnings, first = [], 0
  truncated = set(answer.truncated)
  for number, text in enumerate(query.texts):
    count = len(query_lib.lines_of(text))
    of_lines = answer.hypotheses[first : first + count]
    ranks = range(min(1 + query.alternatives, max(map(len, of_lines))))
    texts.append(['\n'.join(line[min(rank, len(line) - 1)].text for line in of_lines) for rank in ranks])
    where = f'q[{number}]' if query.is_list else 'q'
    for i in range(count):
      if first + i in truncated:
        line = f'line {i + 1} of {where}' if count > 1 else where
        warnings.append(f'{line} is {over_the_length} and was translated in part')
    first += count
  best, alternatives = [found[0] for found in texts], [found[1:] for found in texts]
  result: dict[str, Any] = {'translatedText': best if query.is_list else best[0]}
  if query.alternatives:
    result['alternatives'] = alternatives if query.is_list else alternatives[0]
  return {**result, **({'warnings': warnings} if warnings else {})}
