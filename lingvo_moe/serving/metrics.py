"""Metrics of a server, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client as prometheus
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
HUNG_UP = 499  # the status, as nginx has it, of a request whose client left before the answer

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
  """Counters and histograms of one server.

  Args:
    waiting: returns the number of lines that wait.
    model: name of the model.
    checkpoint: the checkpoint in words.
  """

  def __init__(self, waiting: Callable[[], int], model: str, checkpoint: str):
    registry = self._registry = prometheus.CollectorRegistry()
    make = lambda kind, name, about, *labels, **more: kind(
      f'lingvo_moe_{name}', about, labels, registry=registry, **more
    )
    ProcessCollector(registry=registry)
    make(prometheus.Info, 'model', 'Model and checkpoint that are served.').info(
      {'model': model, 'checkpoint': checkpoint}
    )
    make(prometheus.Gauge, 'waiting_lines', 'Lines that wait to be translated.').set_function(waiting)
    self._requests = make(
      prometheus.Counter, 'requests', 'HTTP requests by path and status; 499: the client hung up.', 'path', 'status'
    )
    self._seconds = make(
      prometheus.Histogram, 'request_seconds', 'Seconds from request to answer.', 'path', buckets=_SECONDS
    )
    self._batch_lines = make(prometheus.Histogram, 'batch_lines', 'Lines of a batch.', buckets=_LINES)
    self._batch_seconds = make(prometheus.Histogram, 'batch_seconds', 'Seconds to translate a batch.', buckets=_SECONDS)
    self._truncated = make(prometheus.Counter, 'truncated_lines', 'Lines over the length limit, translated in part.')

  def request(self, path: str, status: int, seconds: float) -> None:
    self._requests.labels(path, str(status)).inc()
    if status != HUNG_UP:
      self._seconds.labels(path).observe(seconds)

  def batch(self, lines: int, seconds: float) -> None:
    self._batch_lines.observe(lines)
    self._batch_seconds.observe(seconds)

  def truncated(self, lines: int) -> None:
    self._truncated.inc(lines)

  def text(self) -> bytes:
    return prometheus.generate_latest(self._registry)
