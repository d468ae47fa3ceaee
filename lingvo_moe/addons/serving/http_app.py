"""HTTP interface of a model: routes of its service, health, metrics and a page; every error is JSON."""

import contextlib
import ctypes
import inspect
import sys
import time
import traceback
from typing import Any

from aiohttp import web

from lingvo_moe.addons.serving import server_metrics as metrics_lib
from lingvo_moe.addons.serving import trial_page
from lingvo_moe.addons.serving.dynamic_batching import Batcher, QueueFullError
from lingvo_moe.addons.serving.generate_routes import Generation
from lingvo_moe.addons.serving.origins import Origins
from lingvo_moe.addons.serving.query import BadQueryError
from lingvo_moe.addons.serving.service import GET, INTERNAL, Limits, Route
from lingvo_moe.addons.serving.translate_routes import DOWNLOAD, Translation
from lingvo_moe.core.errors import UserError
from lingvo_moe.text.text_model import TextModel
from lingvo_moe.text.translator import Answers

_TRIM_SECONDS = 60.0


class HttpApp:
  """Handlers for one model; `batching` are options of Batcher."""

  def __init__(self, run: TextModel, *, limits: Limits | None = None, origins: Origins | None = None, **batching: Any):
    self.draining = False  # whether new work is refused, and what was accepted is answered
    self.in_flight = 0  # number of requests that are being answered
    self._run = run
    self._limits = limits or Limits()
    self._origins = origins or Origins()
    self._trimmed = time.monotonic()
    service = (Generation if run.continues_text else Translation)(run, self._limits, self._origins)
    self._answer_lines = service.answer
    service.batcher = self.batcher = Batcher(self._answer_batch, observe=self._after_batch, **batching)
    self._metrics = metrics_lib.Metrics(lambda: self.batcher.waiting, run.model, run.checkpoint)
    self._routes = {
      '/': Route(
        GET, lambda _: web.Response(text=trial_page.HTML, content_type='text/html', headers=trial_page.HEADERS)
      ),
      **service.routes,
      '/health': Route(GET, self._health),
      '/metrics': Route(GET, lambda _: web.Response(body=self._metrics.text(), headers=metrics_lib.HEADERS)),
    }

  def _answer_batch(self, lines: list[Any], key: Any) -> Answers:
    answers = self._answer_lines(lines, key)
    self._metrics.truncated.inc(len(answers.truncated))
    return answers

  def _after_batch(self, lines: int, seconds: float) -> None:
    self._metrics.batch_lines.observe(lines)
    self._metrics.batch_seconds.observe(seconds)
    if time.monotonic() >= self._trimmed + _TRIM_SECONDS:
      self._trimmed = time.monotonic()
      _trim_memory()

  async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
    """Answers a request, and counts it; errors are JSON."""
    begin = time.monotonic()
    self.in_flight += 1
    status = metrics_lib.HUNG_UP  # what is raised below all is asyncio.CancelledError
    try:
      response = await self._guarded(request)
      status = response.status
      if not response.prepared:  # as a stream is, which has sent its headers
        response.headers.update(self._origins.headers(request.headers))
        if self.draining or not request.content.is_eof():
          response.force_close()
      return response
    finally:
      self.in_flight -= 1
      path = self._path(request)
      self._metrics.request(path if path in self._routes else 'other', status, time.monotonic() - begin)

  def malformed(self, status: int, why: str) -> web.Response:
    """Answers what is no HTTP request, and counts it."""
    self._metrics.request('other', status, 0.0)
    return _error(status, why)

  async def _guarded(self, request: web.BaseRequest) -> web.StreamResponse:
    try:
      return await self._routed(request)
    except BadQueryError as e:
      return _error(e.status, str(e))
    except QueueFullError as e:
      return _error(503, str(e), {'Retry-After': str(e.retry_after)})
    except ConnectionError:  # the client left while it sent the body, or was sent a stream
      return _error(metrics_lib.HUNG_UP, 'the client left')
    except UserError as e:
      return _error(500, str(e))
    except Exception:
      traceback.print_exc(file=sys.stderr)
      return _error(500, INTERNAL)

  async def _routed(self, request: web.BaseRequest) -> web.StreamResponse:
    if refusal := self._origins.refusal(request.headers):
      return _error(403, refusal)
    if (route := self._routes.get(self._path(request))) is None:
      return _error(404, f'no such path; there are {", ".join(self._routes)}')
    allow = {'Allow': ', '.join(route.methods)}
    if request.method not in route.methods:
      return _error(405, f'{request.path} takes {allow["Allow"]}; not {request.method:.20}', allow)
    if request.method == 'OPTIONS':
      return web.Response(status=204, headers=allow)
    if self.draining and 'GET' not in route.methods:
      return _error(503, 'the server is about to end', {'Retry-After': '5'})
    answer = route.handle(request)
    return await answer if inspect.isawaitable(answer) else answer

  def _path(self, request: web.BaseRequest) -> str:
    return DOWNLOAD if request.path.startswith(DOWNLOAD) else request.path

  def _health(self, request: web.BaseRequest) -> web.Response:
    state = {
      'status': 'draining' if self.draining else 'ok',
      'model': self._run.model,
      'checkpoint': self._run.checkpoint,
      'continues_text': self._run.continues_text,
      'waiting_lines': self.batcher.waiting,
      'limits': self._limits._asdict(),
    }
    return web.json_response(state, status=503 if self.draining else 200)


def _trim_memory() -> None:
  """Gives free memory back to the system, where the C library can.

  Batches of all shapes leave free pieces in the heaps of TensorFlow's threads, which otherwise grow slowly for hours.
  """
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL('libc.so.6').malloc_trim(0)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
  return web.json_response({'error': message}, status=status, headers=headers)
