"""Serves a run over HTTP as LibreTranslate does: POST /translate, /detect, /translate_file, and a page to try it.

  lingvo-moe serve runs/mine --port=5000
  curl http://127.0.0.1:5000/translate -H 'Content-Type: application/json' -d '{"q": "Guten Tag.", "target": "en"}'

A language model continues prompts instead: POST /generate, with a stream of its text on request.

The log directory may also be what lingvo-moe export --format=litert wrote, which is served without TensorFlow.
The checkpoint with the lowest dev loss is used, and printed; --step=N and --checkpoint=last select another one.
Requests that arrive together share a batch. The server listens on this machine alone; --host=0.0.0.0 lets other
machines in, without a password. Web pages of other sites are rejected unless --cors names them. SIGTERM ends the
server: accepted requests are answered, and the exit status is 0. docs/serving.md has the details.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lingvo_moe import translate
from lingvo_moe.cli import app, checkpoint_flags, machine
from lingvo_moe.cli.options import flag
from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.text.text_model import Asked

# Modules that import TensorFlow or the extra are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.text.text_model import TextModel


class Options(checkpoint_flags.TextOptions):
  """Options of the job."""

  host: str = flag('127.0.0.1', 'Address to listen on; 0.0.0.0 for all of this machine.')
  port: int = flag(5000, 'Port to listen on; 0: any that is free.', lower_bound=0, upper_bound=65535)
  max_batch_lines: int = flag(
    64, 'Lines, or sentences of lines of several, that are translated together.', lower_bound=1
  )
  batch_wait_ms: float = flag(
    5.0, 'Milliseconds that a line waits for others to join it.', lower_bound=0, upper_bound=1e6
  )
  max_waiting_lines: int = flag(1000, 'Lines that may wait; more are refused (503).', lower_bound=1)
  max_body_bytes: int = flag(1 << 20, 'Bytes of a request; more are refused (413).', lower_bound=1)
  max_file_bytes: int = flag(10 << 20, 'Bytes of a file to translate, packed and unpacked.', lower_bound=1)
  max_prompt_chars: int = flag(2000, 'Characters of a prompt; more are refused (413).', lower_bound=1)
  drain_seconds: float = flag(
    30.0, 'Seconds to answer accepted requests after SIGTERM.', lower_bound=0, upper_bound=1e6
  )
  allowed_hosts: Sequence[str] = flag((), 'Names of the server besides those of loopback; others are refused (403).')
  cors: Sequence[str] = flag((), "Origins, such as https://my.site, whose pages may use the server (CORS), or '*'.")


@app.command(Options, tensorflow=False, takes=('logdir',))
def main(options: Options) -> int:
  require_extra()
  return serve(options)


def require_extra() -> None:
  """Raises UserError where the extra [serve] is not installed."""
  try:
    import aiohttp  # noqa: F401
    import babel  # noqa: F401
    import prometheus_client  # noqa: F401
    import py3langid  # noqa: F401
  except ModuleNotFoundError as e:
    raise errors.not_installed(f'serving needs {e.name}', e, 'serve') from None


def serve(options: Options) -> int:
  """Serves until a signal; returns the exit status, or ends the process with 1 where requests were not answered."""
  from lingvo_moe.addons.serving import origins, server

  bound = server.bind(options.host, options.port)  # first, as loading takes seconds
  loopback = origins.is_loopback(bound.getsockname()[0])
  allowed = origins.Origins(options.cors, options.allowed_hosts, loopback)
  from lingvo_moe.addons.serving.http_app import HttpApp
  from lingvo_moe.addons.serving.service import Limits

  run = load(options)
  http_app = HttpApp(
    run,
    limits=Limits(options.max_body_bytes, options.max_file_bytes, options.max_prompt_chars),
    origins=allowed,
    max_lines=options.max_batch_lines,
    wait=options.batch_wait_ms / 1000,
    max_waiting=options.max_waiting_lines,
  )
  say = lambda text: print(text, file=sys.stderr, flush=True)
  started = lambda: say(f'serving {run.path} ({run.model}, {run.checkpoint}) on {server.url(bound)}')
  if asyncio.run(server.serve(http_app, bound, options.drain_seconds, started)):
    return 0
  say(f'ended after --drain_seconds={options.drain_seconds:g} with requests that were not answered')
  if sys.stdout is not None:
    sys.stdout.flush()
  os._exit(1)  # the thread of the batch still computes, and TensorFlow crashes where Python ends around it


def load(options: Options) -> TextModel:
  """The run, which has answered once, so that the first request need not wait for what is then compiled."""
  run, _ = translate.load(options, machine.LOCAL)
  if run.continues_text:
    run.generate(['1'], max_new_tokens=1)
    return run
  try:
    languages = run.choose_target(None)
  except UserError:  # several, of which any will do
    languages = next((run.choose_target(target, source) for source, target in run.pairs()), None)
  run.answer(['1'], Asked(languages))
  return run


if __name__ == '__main__':
  main()
