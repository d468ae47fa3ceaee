"""Benchmarks of tools/bench.py: both forms of beam attention, a MoE layer, the input pipeline, two commits."""

import dataclasses
import os
import subprocess
import threading

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import beam, commits, inputs, moe_layer
from benchmarks.clock import Clock
from lingvo_moe.config import registry
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.cldr import corpus as cldr_corpus

TINY = registry.get('mt.bench_s.Tiny')()
ONCE = Clock(warmup=1, calls=1)


@pytest.mark.parametrize('rows, width, length', [(3, 4, 9), (1, 1, 5), (2, 3, 1)])
def test_both_forms_of_a_beam_answer_the_same(rows, width, length):
  config = dataclasses.replace(TINY, beam_size=width)
  attention, thetas = beam.decoder_attention(config)
  x_TBWM, parents_TBW = beam.random_beams(length, rows, width, config.model_dim)
  flat, reordering = (beam.traced(f, attention, thetas, config) for f in (beam.flat, beam.reordering))
  expected = flat(x_TBWM, parents_TBW)
  assert expected.shape == x_TBWM.shape
  np.testing.assert_allclose(reordering(x_TBWM, parents_TBW), expected, atol=1e-5)
  if length > 1 and width > 1:  # parents matter
    own_TBW = tf.zeros_like(parents_TBW) + tf.range(width)
    assert np.abs(flat(x_TBWM, own_TBW) - expected).max() > 0.1


def test_beams_are_timed_at_every_length():
  found = beam.measure(TINY, ONCE, lengths=(4, 8))
  assert [(f['length'], f['sentences'], f['layers']) for f in found] == [(4, 32, 2), (8, 16, 2)]
  for f in found:
    assert f['flat_over_reordering'] == pytest.approx(f['median_s'] / f['reordering_s'], rel=1e-2, abs=6e-4)
    assert f['tokens_per_s'] == pytest.approx(128 / f['median_s'], rel=1e-3)


def test_a_layer_is_timed_by_every_kind_of_dispatch():
  einsum, gather, grouped = moe_layer.measure(TINY, ONCE)
  assert [found['dispatch'] for found in (einsum, gather, grouped)] == ['einsum', 'gather', 'grouped']
  assert einsum['flops'] - gather['flops'] == 5 * 2 * 128 * 64 * 32
  for found in einsum, gather, grouped:
    assert found['tokens_per_s'] == pytest.approx(128 / found['median_s'], rel=1e-3)
    assert 0 < found['first_dropped'] < 1 and 0 < found['second_skipped'] < 1
  assert einsum['second_dropped'] == gather['second_dropped'] == grouped['second_dropped']  # of the same routing


def test_loads_are_as_they_say():
  layer = next(layer.ffn for layer in TINY.model().encoder.layers.values() if layer.is_moe)
  load = lambda kind: layer(theta_of(kind), tokens[kind][0], tf.zeros([8, 16]))[1].stats.tokens_E.numpy()
  tokens = {kind: moe_layer.routed(layer, layer.num_groups, (8, 16, layer.model_dim), kind) for kind in moe_layer.LOADS}
  theta_of = lambda kind: {**weights_lib.initialize(layer.weights(), 0), 'gate': tokens[kind][1]}
  np.testing.assert_array_equal(load('balanced'), np.full(layer.num_experts, 2 * 128 / layer.num_experts))
  assert np.all(np.diff(load('skewed')[[0, 1, 3]]) < 0) and np.sum(load('skewed')) == 2 * 128


@pytest.mark.slow
def test_a_dropless_layer_is_timed_in_rounds_in_blocks_and_with_room_for_all():
  found = {(f['mode'], f['serving'], f['load']): f for f in moe_layer.measure_rounds(TINY, ONCE)}
  assert len(found) == 14
  for mode in ('training', 'inference'):
    even, skewed, roomy = (
      found[mode, *of] for of in (('rounds', 'balanced'), ('rounds', 'skewed'), ('room for all', 'skewed'))
    )
    assert even['rounds'] == roomy['rounds'] == 1 < skewed['rounds']
    assert even['bytes'] == skewed['bytes'] < roomy['bytes']
    assert even['dropped'] == skewed['dropped'] == roomy['dropped'] == 0
  assert found['training', 'dropping', 'skewed']['dropped'] > 0 == found['training', 'dropping', 'balanced']['dropped']


def test_no_gradient_of_a_layer_is_left_out():
  tokens = np.random.default_rng(0).normal(size=[8, 16, TINY.model_dim])
  step = moe_layer.Step(TINY, {'dispatch': 'gather'}, tokens, jit=False)
  step.run()
  assert len(step.sums) == 1 + 1 + 3 and np.all(step.sums != 0)  # loss; tokens; gate, wi, wo


def test_the_input_pipeline_is_timed_on_the_default_corpus(monkeypatch):
  make = cldr_corpus.make_corpus
  few = lambda folder, _: make(folder, ['fo', 'eo'], progress=False)
  monkeypatch.setattr(inputs.cldr_corpus, 'make_corpus', few)
  config = dataclasses.replace(TINY, source_vocab_size=600, target_vocab_size=500, window=64, max_length=32)
  (found,) = inputs.measure(config, ONCE)
  assert found['pairs'] == 2 and found['temperature'] == 5.0 and 0 < found['padding'] < 1
  assert 0 < found['tokens_per_s'] < 2 * 128 * found['batches_per_s']


def test_all_threads_share_one_core_meanwhile():
  before, seen = os.sched_getaffinity(0), []
  begin, end = threading.Event(), threading.Event()
  waiting = threading.Thread(target=lambda: (begin.wait(), seen.append(os.sched_getaffinity(0)), end.set()))
  waiting.start()
  with inputs.one_core():
    seen.append(os.sched_getaffinity(0))
    begin.set()
    end.wait()
  waiting.join()
  assert seen == [{min(before)}] * 2 and os.sched_getaffinity(0) == before


# Tells what was imported: the speed of the package, and of its params where they are the checkout's own.
FAKE_TOOL = """import json, os, sys
import lingvo_moe, lingvo_moe.params
own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.environ['LOG'], 'a') as f:
  f.write(f'{lingvo_moe.SPEED} {os.path.realpath(lingvo_moe.params.__file__).startswith(os.path.realpath(own))}\\n')
if '--what=bad' in sys.argv:
  sys.exit('error: it cannot')
path = sys.argv[-1].removeprefix('--json=')
with open(path, 'w') as f:
  json.dump({'model': 'm', 'what': 'train', 'dispatch': f'{lingvo_moe.SPEED}', 'tokens_per_s': lingvo_moe.SPEED}, f)
"""


def git(root, *args):
  identity = ['-c', 'user.name=a', '-c', 'user.email=a@b', '-c', 'commit.gpgsign=false']
  return subprocess.run(['git', '-C', root, *identity, *args], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path, monkeypatch):
  """A checkout whose commits, named empty, slow and fast, have 0, 100 and 150 tokens a second; it has 300."""
  root = tmp_path / 'checkout'
  for folder in ('lingvo_moe', 'params', 'tools'):
    (root / folder).mkdir(parents=True)
  git(root, 'init', '--quiet')
  (root / 'lingvo_moe' / '__init__.py').write_text('SPEED = 0.0\n')
  (root / 'params' / '__init__.py').write_text('')
  for name, speed in (('empty', 0.0), ('slow', 100.0), ('fast', 150.0)):
    (root / 'lingvo_moe' / '__init__.py').write_text(f'SPEED = {speed}\n')
    git(root, 'add', '-A')
    git(root, 'commit', '--quiet', '-m', name)
    git(root, 'tag', name)
    (root / 'tools' / 'bench.py').write_text(FAKE_TOOL)
  (root / 'lingvo_moe' / '__init__.py').write_text('SPEED = 300.0\n')
  monkeypatch.setenv('LOG', str(tmp_path / 'log'))
  monkeypatch.setenv('PYTHONDONTWRITEBYTECODE', '1')  # what Python writes is no remnant of a comparison
  return str(root)


def assert_clean(root):
  assert len(git(root, 'worktree', 'list').splitlines()) == 1
  assert git(root, 'status', '--porcelain').strip() == 'M lingvo_moe/__init__.py'


def test_two_commits_run_in_turn_and_nothing_is_left(checkout, tmp_path):
  (found,) = commits.compare(checkout, 'slow', ['--what=train'], rounds=2)
  assert found == ({'model': 'm', 'what': 'train'}, [300.0, 300.0], [100.0, 100.0], 3.0)
  ran = [line.split() for line in (tmp_path / 'log').read_text().splitlines()]
  assert [speed for speed, _ in ran] == ['300.0', '100.0'] * 2
  assert [own for _, own in ran[1::2]] == ['True', 'True']  # the other commit's params, too
  assert_clean(checkout)


@pytest.mark.parametrize(
  'commit, flags, message',
  [
    ('nonsense', [], "saw 'nonsense', which git does not know"),
    ('--help', [], "saw '--help', which git does not know"),
    ('empty', [], '--versus=empty has no benchmark: give a later commit'),
    ('fast', ['--what=bad'], 'this checkout: its benchmark ended with exit status 1: error: it cannot'),
  ],
)
def test_mistakes_of_versus_are_told_and_nothing_is_left(checkout, commit, flags, message):
  with pytest.raises(UserError) as error:
    commits.compare(checkout, commit, flags, rounds=1)
  assert message in str(error.value)
  assert_clean(checkout)


def test_versus_outside_of_a_checkout_is_told(tmp_path):
  with pytest.raises(UserError, match='is none: run tools/bench.py of a clone'):
    commits.compare(str(tmp_path), 'HEAD', [], rounds=1)
