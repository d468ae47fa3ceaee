"""Metrics of a server, in Prometheus' text form."""

from collections.abc import Callable

import prometheus_client as prometheus
from prometheus_client.process_collector import ProcessCollector

HEADERS = {'Content-Type': prometheus.CONTENT_TYPE_LATEST}
HUNG_UP = 499  # the status, as nginx has it, of a request whose client left before the answer

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
  """Counters and histograms of one server; `waiting` returns the number of lines that wait."""

  def __init__(self, waiting: Callable[[], int], model: str, checkpoint: str):
    self._registry = prometheus.CollectorRegistry()

    def make(kind, name, about, *labels, **more):
      return kind(f'lingvo_moe_{name}', about, labels, registry=self._registry, **more)

    Histogram, Counter = prometheus.Histogram, prometheus.Counter
    ProcessCollector(registry=self._registry)
    info = make(prometheus.Info, 'model', 'Model and checkpoint that are served.')
    info.info({'model': model, 'checkpoint': checkpoint})
    make(prometheus.Gauge, 'waiting_lines', 'Lines that wait to be translated.').set_function(waiting)
    about = 'HTTP requests by path and status; 499: the client hung up.'
    self._requests = make(Counter, 'requests', about, 'path', 'status')
    self._seconds = make(Histogram, 'request_seconds', 'Seconds from request to answer.', 'path', buckets=_SECONDS)
    self.batch_lines = make(
      Histogram, 'batch_lines', 'Lines of a batch, or sentences of lines of several.', buckets=_LINES
    )
    self.batch_seconds = make(Histogram, 'batch_seconds', 'Seconds to translate a batch.', buckets=_SECONDS)
    self.truncated = make(Counter, 'truncated_lines', 'Lines over the length limit, translated in part.')

  def request(self, path: str, status: int, seconds: float) -> None:
    """Counts a request, and its seconds where it was answered."""
    self._requests.labels(path, str(status)).inc()
    if status != HUNG_UP:
      self._seconds.labels(path).observe(seconds)

  def text(self) -> bytes:
    return prometheus.generate_latest(self._registry)
