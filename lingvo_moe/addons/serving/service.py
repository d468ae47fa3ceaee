"""Service of a server: what it answers by path, and how a body is read."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, NamedTuple

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from lingvo_moe.addons.serving import query as query_lib
from lingvo_moe.addons.serving.dynamic_batching import Batcher
from lingvo_moe.addons.serving.origins import Origins
from lingvo_moe.addons.serving.query import BadQueryError, Fields
from lingvo_moe.core.errors import UserError, respelled
from lingvo_moe.text.text_model import TextModel
from lingvo_moe.text.translator import Answers

INTERNAL = 'internal error; the log of the server has it'
GET, POST = ('GET', 'HEAD', 'OPTIONS'), ('POST', 'OPTIONS')
_BODY_SECONDS = 30  # for a client to send a body


class Limits(NamedTuple):
  """What a request may have, at most."""

  body: int = 1 << 20  # bytes, after it is decompressed
  file: int = 10 << 20  # bytes of a file to translate, packed and unpacked
  prompt: int = 2000  # characters


class Route(NamedTuple):
  """Methods that a path takes, and what answers it."""

  methods: tuple[str, ...]
  handle: Callable[[web.BaseRequest], web.Response | Awaitable[web.StreamResponse]]


class Service:
  """Base of what is served of a model."""

  batcher: Batcher  # which computes by `answer`; set before a request comes
  routes: dict[str, Route]  # by path, of POST

  def __init__(self, run: TextModel, limits: Limits, origins: Origins) -> None:
    self.run, self.limits, self.origins = run, limits, origins

  def answer(self, parts: list[Any], key: Any) -> Answers:
    """Answers parts of lines of one key; called by the batcher's thread."""
    raise NotImplementedError

  def check_count(self, count: int) -> None:
    """Refuses more lines than may wait."""
    if count > (most := self.batcher.max_waiting):
      raise BadQueryError(f'q has {count} lines; at most {most} are taken at once', 413)

  async def compute(self, parts: Sequence[Any], key: Hashable, ends: Sequence[int] | None = None) -> Answers:
    """The answers of a batch; cancelled with the handler when the client hangs up. Arguments as of Batcher.submit."""
    self.check_count(len(parts) if ends is None else len(ends))
    return await asyncio.wrap_future(self.batcher.submit(parts, key, ends))

  async def fields(self, request: web.BaseRequest, most: int | None = None) -> Fields:
    """Fields of the body of a request."""
    body = await _body(request, most or self.limits.body)
    return query_lib.parse(body, request.headers.get('Content-Type', ''), request.rel_url.raw_query_string)


async def _body(request: web.BaseRequest, most: int) -> bytes:
  too_large = BadQueryError(f'a body has at most {most} bytes: send less at once', 413)
  if (request.content_length or 0) > most:
    raise too_large
  if request.version == HttpVersion11 and request.headers.get('Expect', '').lower() == '100-continue':
    await request.writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
  body = bytearray()
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > most:
          raise too_large
  except TimeoutError:
    raise BadQueryError(f'the body took more than {_BODY_SECONDS} seconds to come', 408) from None
  except (web.RequestPayloadError, HttpProcessingError):
    encoding = request.headers.get('Content-Encoding')
    said = f'{encoding:.40}, as its Content-Encoding says' if encoding else 'as long as its header says'
    raise BadQueryError(f'the body is not {said}') from None
  return bytes(body)


def refused(function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
  """Calls a function; what it refuses is the client's mistake."""
  try:
    return function(*arguments, **more)
  except UserError as e:
    raise BadQueryError(respelled(str(e), None)) from None
