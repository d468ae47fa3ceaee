"""Clock for all benchmarks: warm-up calls, then the median of timed ones, with the load from other processes."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

# Number of cores kept busy by other processes above which a timing is not used in comparisons.
MAX_OTHER_CORES = 0.2

Timing = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Clock:
  """Timer that makes `warmup` calls, then `calls` that count; both at least 1."""

  warmup: int = 3
  calls: int = 9

  def time(self, call: Callable[[], object]) -> Timing:
    """Times one function; see `time_in_turn`."""
    return self.time_in_turn({'': call})['']

  def time_in_turn(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
    """Times functions, each called once in every round, so that a disturbance affects all of them.

    Args:
      functions: by name; a function returns when its work is done.

    Returns:
      By name, values for JSON: median_s, min_s, max_s of the calls that count; first_call_s, which traces and
      compiles; own_cores and other_cores, the number of cores that this process and all others kept busy during the
      calls that count; and peak_rss_mib, the peak memory of this process so far.
    """
    seconds = {name: [] for name in functions}
    for number in range(self.warmup + self.calls):
      if number == self.warmup:
        busy, own, start = _cpu()
      for name, call in functions.items():
        begun = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - begun)
    busy_now, own_now, now = _cpu()
    own, busy = own_now - own, busy_now - busy
    load = {
      'own_cores': round(own / (now - start), 2),
      'other_cores': round(max(0.0, busy - own) / (now - start), 2),
      'peak_rss_mib': peak_rss_mib(),
    }
    timings = {}
    for name, (first, *others) in seconds.items():
      timed = others[self.warmup - 1 :]
      timings[name] = {
        'median_s': round(statistics.median(timed), 6),
        'min_s': round(min(timed), 6),
        'max_s': round(max(timed), 6),
        'first_call_s': round(first, 2),
        **load,
      }
    return timings


def peak_rss_mib() -> int:
  """Peak memory of this process so far, in MiB."""
  # getrusage counts what the parent held when it started this process.
  with open('/proc/self/status', encoding='ascii', errors='replace') as f:
    return round(next(int(line.split()[1]) for line in f if line.startswith('VmHWM:')) / 1024)


def _cpu() -> tuple[float, float, float]:
  """CPU seconds of the whole machine and of this process, and the time."""
  with open('/proc/stat', encoding='ascii') as f:
    fields = [int(x) for x in f.readline().split()[1:]]
  busy = (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf('SC_CLK_TCK')
  return busy, time.process_time(), time.perf_counter()
