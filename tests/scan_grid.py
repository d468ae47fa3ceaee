"""Grid of the ways to train one MoE model: each combination trains a step to equal numbers, or is refused in a line.

How a stack is run changes no number: scanned or not, rematerialised or not, by whatever dispatcher, in micro-batches.
`python -m tests.scan_grid` tries all combinations, for an hour or so; tests/test_scan_grid.py some of them.
"""

import collections
import functools
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.layers.experts import EXPERTS
from lingvo_moe.layers.gates.table import GATES
from lingvo_moe.ops import backend, cpu
from lingvo_moe.ops.remat import POLICIES
from lingvo_moe.tasks.mt.random_batch import random_batch

MODEL = {'expert': tuple(EXPERTS), 'expert_bias': (False, True), 'gate': tuple(GATES)}  # changes the numbers
WAYS = {  # change none; the first of each is the plain one
  'scan_layers': (False, True),
  'remat': POLICIES,
  'dispatch': ('einsum', *sorted(DISPATCHERS.keys() - {'einsum'}), 'auto'),
  'micro_batches': (1, 2),
}
FIELDS = MODEL | WAYS
# Balance losses of these gates are of what is given at once; docs/fields.md, micro_batches.
OF_EACH_PART = ('noisy_top_k', 'hierarchical')
_SIZES = {
  'encoder_layers': 2,
  'decoder_layers': 1,
  'experts_in': 'encoder',
  'moe_every': 1,
  'num_groups': 2,
  'num_experts': 4,
  'model_dim': 4,
  'ff_dim': 6,
  'num_heads': 1,
  'head_dim': 2,
  'source_vocab_size': 20,
  'target_vocab_size': 20,
  'max_length': 5,
  'batch_tokens': 20,
  'expert_dropout': 0.2,
}


class Outcome(NamedTuple):
  """Outcome of a step: loss and norm of the gradient, or the line of a refusal."""

  numbers: tuple[float, ...] = ()
  refusal: str = ''


def step(combination: Mapping[str, Any], traced: bool = False) -> Outcome:
  """One step of the model on the backend of this machine; `traced` as a run does, for shapes that are not known."""
  sizes = _SIZES | ({'groups_of_experts': 3, 'num_experts': 9} if combination['gate'] == 'hierarchical' else {})
  try:
    config = registry.get('mt.cldr.Tiny')(**sizes, **combination)
  except UserError as e:
    return Outcome(refusal=str(e).partition('\n  In call to configurable')[0])  # which gin adds
  program, batch = config.program(), random_batch(config, full=False)
  run = functools.partial(_run, program)
  if traced:
    specs = {name: tf.TensorSpec(spec.shape, spec.dtype) for name, spec in program.weight_specs.items()}
    shapes = {name: tf.TensorSpec([None] * x.ndim, x.dtype) for name, x in batch.items()}
    run = tf.function(run, autograph=False, input_signature=[specs, shapes])
  weights = {name: w + 0.05 for name, w in program.init()['weights'].items()}  # no bias is zero
  loss, norm = run(weights, {name: tf.constant(x) for name, x in batch.items()})
  return Outcome((float(loss), float(norm)))


def _run(program, weights, batch):
  with backend.use(cpu.backend(training=True)):
    grads, metrics = program.gradients(tf.constant(5, tf.int64), weights, batch)
  return metrics['loss'], tf.linalg.global_norm([tf.convert_to_tensor(g) for g in grads.values()])


@functools.cache
def plain(expert: str, expert_bias: bool, gate: str, micro_batches: int) -> Outcome:
  """Outcome of the plain way of a model, unrolled, with all that is not recomputed, by einsums."""
  of_parts = {'micro_batches': micro_batches if gate in OF_EACH_PART else 1}
  ways = {name: values[0] for name, values in WAYS.items()} | of_parts
  return step({'expert': expert, 'expert_bias': expert_bias, 'gate': gate, **ways})


def check(combination: Mapping[str, Any], traced: bool = False) -> str:
  """'equal' to the plain way, or 'refused' as the plain way is; AssertionError for all else."""
  got = step(combination, traced)
  expected = plain(*(combination[name] for name in (*MODEL, 'micro_batches')))
  assert bool(got.refusal) == bool(expected.refusal) and '\n' not in got.refusal, (combination, got)
  np.testing.assert_allclose(got.numbers, expected.numbers, rtol=2e-5, err_msg=str(combination))
  return 'refused' if got.refusal else 'equal'


def everything() -> Iterator[dict[str, Any]]:
  return (dict(zip(FIELDS, values)) for values in itertools.product(*FIELDS.values()))


def pairwise() -> list[dict[str, Any]]:
  """Scanned combinations in which each two values of two fields are together at least once, greedily few."""
  pairs_of = lambda combination: set(itertools.combinations(combination.items(), 2))
  left = [(c, pairs_of(c)) for c in everything() if c['scan_layers']]
  missing = set().union(*(pairs for _, pairs in left))
  chosen = []
  while missing:
    best, pairs = max(left, key=lambda entry: len(entry[1] & missing))
    chosen.append(best)
    missing -= pairs
  return chosen


def main(arguments: Sequence[str]) -> int:
  """Tries all combinations with given values, such as gate=top2, and counts what came of them by gate and expert."""
  found = collections.defaultdict(collections.Counter)
  logging.getLogger('tensorflow').setLevel(logging.CRITICAL)  # a step that fails leaves arrays unused
  given = dict(argument.split('=') for argument in arguments)
  for combination in everything():
    if any(str(combination[name]) not in values.split(',') for name, values in given.items()):
      continue
    try:
      outcome = check(combination)
    except Exception as e:
      outcome = type(e).__name__
      print(combination, f'{e}'.strip().splitlines()[-1:], flush=True)
    found[tuple(combination[name] for name in MODEL)][outcome] += 1
    print(f'\r{sum(map(sum, (counts.values() for counts in found.values()))):,} tried', end='', file=sys.stderr)
  print(' | '.join([*MODEL, 'outcomes']))
  for model, counts in found.items():
    print(' | '.join(map(str, [*model, dict(counts)])))
  return int(any(outcome not in ('equal', 'refused') for counts in found.values() for outcome in counts))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
