"""Updates of weights of one shape at once, for XLA, against those of each weight by itself."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.ops import backend, xla
from lingvo_moe.optim import updates
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.adam import Adam
from lingvo_moe.optim.moving_average import WithMovingAverage

KINDS = {
  'matrix': WeightSpec((4, 5), 'MH', Constant(0.0), factored='MH'),
  'heads': WeightSpec((4, 2, 5), 'MNK', Constant(0.0), factored='MK'),
  'experts': WeightSpec((3, 4, 5), 'EMH', Constant(0.0), factored='MH'),
  'vector': WeightSpec((5,), 'M', Constant(0.0)),
  'norm': WeightSpec((5,), 'M', Constant(0.0), float32=True),
  'stack': WeightSpec((2, 4, 5), 'LMH', Constant(0.0), factored='MH'),
}
SPECS = {f'{kind}{i}': spec for kind, spec in KINDS.items() for i in range(4)}


OPTIMIZERS = {
  'adafactor': (Adafactor(), 0.5),  # with the norm to which gradients are clipped, or 0
  'clipped': (Adafactor(beta2_cap=1.0, clip=0.3, epsilon2=0.5), 0.0),
  'averaged': (WithMovingAverage(Adafactor(), 0.9), 0.0),
  'adam': (Adam(), 0.5),
}


@pytest.mark.parametrize('optimizer, clip_norm', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_of_one_shape_are_updated_at_once_as_each_by_itself(optimizer, clip_norm):
  rng = np.random.default_rng(0)
  draw = lambda name, scale: tf.cast(scale * rng.normal(size=SPECS[name].shape), SPECS[name].dtype)
  trained = {name: spec for name, spec in SPECS.items() if name != 'matrix1'}  # one is frozen
  slot_specs = {f'{n}/{slot}': s for n, spec in trained.items() for slot, s in optimizer.slots(spec).items()}
  state = {
    'step': tf.constant(0, tf.int64),
    'weights': {name: draw(name, 1.0 + i) for i, name in enumerate(SPECS)},
    'slots': {name: tf.zeros(spec.shape) for name, spec in slot_specs.items()},
  }

  def by(machine, compiled):
    @tf.function(jit_compile=compiled, autograph=False)
    def update(state, grads):
      with backend.use(machine):
        return updates.update(optimizer, state, grads, (SPECS, trained, slot_specs), tf.constant(0.1), clip_norm)

    return update

  at_once, alone = by(dataclasses.replace(xla.BACKEND, updates_at_once=3), True), by(backend.REFERENCE, False)
  got = want = state
  for step in range(3):
    grads = {name: tf.cast(draw(name, 10.0 ** (step - i % 4)), tf.float32) for i, name in enumerate(trained)}
    if not clip_norm:
      grads['heads2'] = tf.cast(grads['heads2'], tf.bfloat16)
    (got, norm), (want, norm_alone) = at_once(got, grads), alone(want, grads)
    np.testing.assert_allclose(norm, norm_alone, rtol=1e-5)
    wide = lambda state: tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), state)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), wide(got), wide(want))


def test_weights_are_alike_if_shape_axes_and_type_are():
  groups = lambda most: [
    ' '.join(sorted(names))
    for names in _groups(dataclasses.replace(xla.BACKEND, updates_at_once=most))
    if not names[0].startswith(('heads', 'experts', 'matrix'))
  ]
  stacks = [f'stack{i}' for i in range(4)]  # those of a scanned stack are few as it is
  vectors = ' '.join(f'{kind}{i}' for kind in ('norm', 'vector') for i in range(4))
  assert groups(8) == [vectors, *stacks]
  assert [len(names.split()) for names in groups(3)] == [3, 3, 2, 1, 1, 1, 1]
  assert groups(1) == [name for name in SPECS if not name.startswith(('heads', 'experts', 'matrix'))]


def _groups(machine):
  with backend.use(machine):
    return updates._alike(SPECS)


def test_weights_of_one_shape_in_two_types_are_updated_apart():
  wide, narrow = (WeightSpec((5,), 'M', Constant(0.0), dtype=dtype) for dtype in (tf.float32, tf.bfloat16))
  with backend.use(dataclasses.replace(xla.BACKEND, updates_at_once=3)):
    assert updates._alike({'a': wide, 'b': narrow, 'c': narrow, 'd': wide}) == [['a', 'd'], ['b', 'c']]
