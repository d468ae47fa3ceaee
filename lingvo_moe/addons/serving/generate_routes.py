"""Continuation of prompts over HTTP by a language model; streamed as server-sent events on request."""

import asyncio
import json
import secrets
import sys
import traceback
from typing import Any

from aiohttp import web

from lingvo_moe.addons.serving.query import BadQueryError
from lingvo_moe.addons.serving.service import INTERNAL, POST, Route, Service, refused
from lingvo_moe.core.errors import UserError
from lingvo_moe.search.continuations import Request, Sampling
from lingvo_moe.text.translator import Answers


class Generation(Service):
  """Service of a language model: /generate. A request that ends before its answer ends the work for it."""

  def __init__(self, *arguments: Any) -> None:
    super().__init__(*arguments)
    self.routes = {'/generate': Route(POST, self._generate)}

  def answer(self, parts: list[Request], key: int) -> Answers:
    return Answers(self.run.translator(key).complete(parts), [])

  async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
    fields = await self.fields(request)
    prompts = fields.texts('prompt', 'the text to continue')
    if any(len(prompt) > self.limits.prompt for prompt in prompts):
      raise BadQueryError(f'a prompt has at most {self.limits.prompt} characters: send its end alone', 413)
    n_best = fields.count('n_best', 'continuations') or 1
    chosen = fields.numbers(Sampling._fields)
    if self.run.configured('search') != 'beam':
      chosen.setdefault('sample_seed', secrets.randbits(31))  # of which the answer tells
    sampling = refused(self.run.sampling, **chosen)
    if n_best > self.run.beam_size:
      raise BadQueryError(f'n_best must be at most {self.run.beam_size}, the beam')
    refused(self.run.translator, n_best)
    loop, pieces, gone = asyncio.get_running_loop(), asyncio.Queue(), False

    def listen(piece: str) -> bool:
      if streams and piece:
        loop.call_soon_threadsafe(pieces.put_nowait, piece)
      return not gone

    streams = bool(fields.get('stream')) and fields['stream'] != 'false'
    if streams and (isinstance(fields['prompt'], list) or n_best > 1):
      raise BadQueryError('a stream is of one prompt and one continuation: leave n_best out, and send a string')
    requests = [Request(prompt, sampling, number, listen) for number, prompt in enumerate(prompts)]
    answers = asyncio.ensure_future(self.compute(requests, n_best))
    told = {'sample_seed': sampling.sample_seed} if 'sample_seed' in chosen else {}
    try:
      if streams:
        return await self._stream(request, answers, pieces, told)
      texts: list[Any] = [[h.text for h in of_prompt] for of_prompt in (await answers).hypotheses]
    finally:
      gone = True
      answers.cancel()
    texts = texts if fields.get('n_best') else [best for best, *_ in texts]
    return web.json_response({'text': texts if isinstance(fields['prompt'], list) else texts[0], **told})

  async def _stream(
    self, request: web.BaseRequest, answers: asyncio.Future[Answers], pieces: asyncio.Queue[str], told: dict[str, Any]
  ) -> web.StreamResponse:
    """Sends an event for each piece of text, and one with 'done' or 'error' at the end."""
    response = web.StreamResponse(headers={'Cache-Control': 'no-store', 'X-Accel-Buffering': 'no'})
    response.content_type = 'text/event-stream'
    response.headers.update(self.origins.headers(request.headers))
    send = lambda event: response.write(f'data: {json.dumps(event, ensure_ascii=False)}\n\n'.encode())
    await asyncio.sleep(0)  # in which a full queue is refused
    if answers.done():
      answers.result()
    await response.prepare(request)
    while not (answers.done() and pieces.empty()):
      piece = asyncio.ensure_future(pieces.get())
      await asyncio.wait([piece, answers], return_when=asyncio.FIRST_COMPLETED)
      if piece.done():
        await send({'text': piece.result()})
      piece.cancel()
    if error := answers.exception():
      if not isinstance(error, UserError):
        traceback.print_exception(error, file=sys.stderr)
      await send({'error': str(error) if isinstance(error, UserError) else INTERNAL})
    else:
      [[best]] = answers.result().hypotheses
      await send({'done': True, 'log_prob': best.log_prob, **told})
    await response.write_eof()
    return response
