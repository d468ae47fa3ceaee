"""Parts of tools/bench.py: the clock, comparisons of figures, profiles, steps."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import against, clock, peak, profile, steps
from benchmarks.clock import Clock
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime.local import LocalRuntime

TINY = registry.get('mt.bench_s.Tiny')()
ONCE = Clock(warmup=1, calls=1)


def ticking(monkeypatch, *seconds):
  """The clock's time goes on by each of these amounts in turn, at every second look."""
  times = np.cumsum([0.0, *(x for s in seconds for x in (s, 0.0))]).tolist()
  monkeypatch.setattr(clock.time, 'perf_counter', lambda: times.pop(0))
  monkeypatch.setattr(clock, '_cpu', lambda: (next(busy), next(own), next(wall)))
  busy, own, wall = iter([100.0, 118.0]), iter([7.0, 22.0]), iter([0.0, 10.0])


def test_the_median_is_of_the_calls_after_warming_up(monkeypatch):
  ticking(monkeypatch, 9.0, 5.0, 2.0, 1.0, 4.0)
  found = Clock(warmup=2, calls=3).time(lambda: None)
  assert (found['median_s'], found['min_s'], found['max_s'], found['first_call_s']) == (2.0, 1.0, 4.0, 9.0)
  # In 10 seconds the machine was busy for 18, of which this process for 15.
  assert (found['own_cores'], found['other_cores']) == (1.5, 0.3)


def test_functions_take_turns():
  calls = []
  found = Clock(warmup=1, calls=2).time_in_turn({name: lambda name=name: calls.append(name) for name in 'ab'})
  assert calls == ['a', 'b'] * 3 and set(found) == {'a', 'b'}


def test_the_peak_of_matrix_products_is_counted_in_multiplications_and_additions(monkeypatch):
  times = iter([0.0, 0.0, 0.5, 0.6, 0.7, 0.95, 3.0])  # two products, of 0.5 and 0.25 seconds
  monkeypatch.setattr(peak.time, 'perf_counter', lambda: next(times))
  assert peak.measure(size=100, seconds=1.0) == pytest.approx(2 * 100**3 / 0.25 / 1e9)


def record(**values):
  return {'model': 'mt.bench_s.Moe16', 'what': 'train', 'tokens_per_s': 3000.0, 'other_cores': 0.0} | values


def read_lines(tmp_path, *lines):
  (tmp_path / 'results').write_text('some log\n' + ''.join(json.dumps(line) + '\n' for line in lines))
  return against.read(str(tmp_path / 'results'))


def test_a_figure_is_compared_with_the_median_of_earlier_runs_that_were_not_disturbed(tmp_path):
  speeds = {1000.0: 0.0, 2000.0: 0.1, 9000.0: 0.9}  # tokens a second, other cores
  runs = [record(tokens_per_s=speed, other_cores=load) for speed, load in speeds.items()]
  others = read_lines(tmp_path, *runs, record(model='mt.bench_s.Dense'), record(what='decode'), {'error': 'rc 1'})
  assert against.earlier(record(), others) == (1500.0, False)
  assert against.earlier(record(), others[2:]) == (9000.0, True)
  assert against.earlier(record(what='latency'), others) is None


def test_kinds_of_dispatch_are_compared_with_their_own(tmp_path):
  ours = [record(what='moe_layer', dispatch=kind, tokens_per_s=speed) for kind, speed in (('gather', 1), ('einsum', 2))]
  found = against.earlier(record(what='moe_layer', dispatch='einsum'), read_lines(tmp_path, *ours))
  assert found.tokens_per_s == 2
  ours = read_lines(tmp_path, record(dispatch='gather'))
  assert against.earlier(record(dispatch='auto'), ours)  # of a train step


@pytest.mark.parametrize('text, message', [('hello\n{"a": 1}\n', 'has none'), (None, 'cannot be read')])
def test_a_file_without_figures_is_told(tmp_path, text, message):
  if text:
    (tmp_path / 'f').write_text(text)
  with pytest.raises(UserError, match=message):
    against.read(str(tmp_path / 'f'))


@pytest.mark.parametrize(
  'damage',
  [{'model': ['bench-S']}, {'what': {}}, {'other_cores': 'none'}, {'tokens_per_s': 0}, {'tokens_per_s': 'inf'}],
)
def test_a_line_with_a_value_of_a_wrong_type_is_skipped(tmp_path, damage):
  assert len(read_lines(tmp_path, record(**damage), record(other_cores=None))) == 1


def test_time_within_is_not_counted_twice():
  spans = [(0, 100, 'run'), (10, 20, 'a'), (12, 5, 'inner'), (40, 10, 'b'), (200, 7, 'c')]
  assert dict(profile.own_times(spans)) == {'run': 70, 'a': 15, 'inner': 5, 'b': 10, 'c': 7}


def test_a_profile_tells_parts_by_name_scopes():
  @tf.function(autograph=False)
  def step(x):
    with tf.name_scope('layer_00/attention'):
      x = tf.matmul(x, x)
    with tf.name_scope('update'):
      return tf.sin(x)

  x = tf.ones([1000, 1000])
  step(x)
  found = profile.by_part(lambda: step(x), times=2)
  assert found['attention'] > found['optimiser'] > 0 and found['gating'] == found['softmax'] == 0


def test_a_profile_of_nothing_is_told():
  with pytest.raises(UserError, match='of which none ran'):
    profile.by_part(lambda: None)


def test_a_profile_is_of_the_cpu(monkeypatch):
  monkeypatch.setattr(profile.tf.config, 'list_physical_devices', lambda kind: ['gpu'])
  with pytest.raises(UserError, match='saw a GPU: hide it'):
    profile.by_part(lambda: None)


def test_decoding_that_cannot_reach_max_length_is_told():
  config = dataclasses.replace(TINY, decode_ratio=0.5)
  with pytest.raises(UserError, match='must make 16 steps to be timed; it made 8: bind decode_ratio = 1.0'):
    steps.decode(config, ONCE, LocalRuntime, rows=1)


def test_one_sentence_cannot_be_shared_by_devices():
  class Shared(LocalRuntime):
    row_multiple = 2

  with pytest.raises(UserError, match='multiple of the 2 parts .* there is 1: take another mesh'):
    steps.decode(TINY, ONCE, Shared, rows=1)
