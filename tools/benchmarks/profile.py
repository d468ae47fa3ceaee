"""Profile of a step on a CPU by part of the model, from TensorFlow's profiler and the layers' name scopes."""

import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from lingvo_moe.addons.analysis.parts import PARTS, part_of
from lingvo_moe.core.errors import UserError

# Profiler's name of a kernel's run: 'encoder/layer_00/attention/einsum/Einsum:_MklEinsum'.
_KERNEL = re.compile(r'([\w.+/>-]+):(\w+)')


def by_part(call: Callable[[], object], times: int = 3) -> dict[str, float]:
  """Seconds that the kernels of each part take in a call, by the names of PARTS.

  Seconds are summed over threads: kernels that run at the same time all count, so the sum may exceed the time of the
  call. Operations outside of all name scopes, such as assignments to variables, count as 'other'. Code that XLA
  compiles, such as updates of large weights on a CPU, is not included.

  Args:
    call: runs TensorFlow's own kernels. It must have been called before, or tracing would be counted too.
    times: number of calls, of which the mean is taken.

  Raises:
    UserError: there is a GPU, whose kernels have other names; or none of TensorFlow's own kernels ran.
  """
  if tf.config.list_physical_devices('GPU'):
    raise UserError('a profile is of kernels on the CPU; saw a GPU: hide it with CUDA_VISIBLE_DEVICES=-1')
  seconds = dict.fromkeys(PARTS, 0.0)
  for plane in _trace(call, times).planes:
    names = {number: metadata.name for number, metadata in plane.event_metadata.items()}
    for line in plane.lines:
      spans = [(e.offset_ps, e.duration_ps, names[e.metadata_id]) for e in line.events]
      for name, own_ps in own_times(spans):
        if kernel := _KERNEL.fullmatch(name):
          seconds[part_of(kernel[1])] += own_ps / 1e12 / times
  if not any(seconds.values()):
    raise UserError("a profile is of TensorFlow's own kernels, of which none ran: leave out what compiles the step")
  return seconds


def own_times(spans: list[tuple[int, int, str]]) -> Iterator[tuple[str, int]]:
  """Yields (name, own time) of each span of a thread, given as (begin, duration, name).

  Own time excludes the spans nested inside.
  """
  open_spans = []  # [end, name, own time], each nested in the one before
  for begin, duration, name in sorted(spans, key=lambda span: (span[0], -span[1])):
    while open_spans and open_spans[-1][0] <= begin:
      yield open_spans.pop()[1:]
    if open_spans:
      open_spans[-1][2] -= duration
    open_spans.append([begin + duration, name, duration])
  while open_spans:
    yield open_spans.pop()[1:]


def _trace(call: Callable[[], object], times: int) -> xplane_pb2.XSpace:
  options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0, device_tracer_level=0)
  with tempfile.TemporaryDirectory() as folder:
    tf.profiler.experimental.start(folder, options)
    try:
      for _ in range(times):
        call()
    finally:
      tf.profiler.experimental.stop()
    (path,) = glob.glob(os.path.join(folder, '**', '*.xplane.pb'), recursive=True)
    with open(path, 'rb') as f:
      return xplane_pb2.XSpace.FromString(f.read())
