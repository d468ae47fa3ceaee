"""Rematerialisation: intermediate values of a function are dropped, and recomputed for its gradient.

Chen et al. (2016), 'Training deep nets with sublinear memory cost': more time, less memory.

Layers mark by `keep` what a loop over blocks may save for its gradient: results of matrix products, tokens that were
sent between devices, choices of gates. All other values follow from these elementwise, or by a sum along an axis. The
loop over the gradients runs each block again, and gives the saved values in place of those that it computes. XLA then
drops whatever made them.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.ops.custom_gradient import pull_back

# 'none': all values are kept, in a scanned stack those that `keep` marks; 'block': only the input of each layer, or of
# each block of a scanned stack; 'attention': as 'none', but for those inside attention.
POLICIES = ('none', 'attention', 'block')


class Kept(NamedTuple):
  """Activation that `keep` has marked, with its axes."""

  x: tf.Tensor
  dims: str
  first: str

  def shard(self, x: tf.Tensor, stacked: str = '') -> tf.Tensor:
    """Shards a tensor as this activation is; `stacked` has the letters of axes before those of the activation."""
    return xla_sharding.shard(x, stacked + self.dims, self.first)


_marked: contextvars.ContextVar[Callable[[Kept], tf.Tensor] | None] = contextvars.ContextVar('marked', default=None)


def keep(x: tf.Tensor, dims: str, first: str = '') -> tf.Tensor:
  """Shards an activation (xla_sharding.shard), and marks it as one that is kept for the gradient."""
  kept = Kept(xla_sharding.shard(x, dims, first), dims, first)
  return kept.x if _marked.get() is None else _marked.get()(kept)


def unkept() -> contextlib.AbstractContextManager[None]:
  """Context in which `keep` marks nothing."""
  return _marking(None)


@contextlib.contextmanager
def recording() -> Iterator[list[Kept]]:
  """Context that records the activations that `keep` marks."""
  records: list[Kept] = []
  with _marking(functools.partial(_record, records)):
    yield records


def giving(values: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[None]:
  """Context in which `keep` returns these values, in order; after the last value it returns its activations."""
  return _marking(functools.partial(_give, iter(values)))


def _record(records: list[Kept], kept: Kept) -> tf.Tensor:
  """Records an activation, and leaves it as it is."""
  records.append(kept)
  return kept.x


def _give(values: Iterator[tf.Tensor], kept: Kept) -> tf.Tensor:
  """Next value in place of an activation, to which the value's gradient passes unchanged."""
  value = next(values, None)
  if value is None or not value.dtype.is_floating:
    return kept.x if value is None else value
  return tf.custom_gradient(lambda _: (tf.identity(value), lambda dy: dy))(kept.x)


@contextlib.contextmanager
def _marking(mark: Callable[[Kept], tf.Tensor] | None) -> Iterator[None]:
  token = _marked.set(mark)
  try:
    yield
  finally:
    _marked.reset(token)


def rematerialised(function: Callable[..., Any], *args: Any, **constants: Any) -> Any:
  """Calls function(*args, **constants), and keeps only the arguments for the gradient.

  Arguments and results are nests of tensors, and may have None. Constants get no gradient, nor do values that the
  function closes over.
  """
  structure = []
  scope = tf.get_current_name_scope()

  def call(*tensors):
    with unkept():
      structure[:] = [function(*_with_tensors(args, tensors), **constants)]
    return _tensors(structure[0])

  def recompute(*tensors):
    with tf.name_scope(again(scope)):
      return call(*tensors)

  @tf.custom_gradient
  def run(*tensors):
    def grad(*dresults):
      # The second run waits for the incoming gradient; otherwise common subexpression elimination would keep the values
      # of the first run instead.
      later = xla_sharding.barrier([*tensors, *dresults])
      return pull_back(recompute, later[: len(tensors)], later[len(tensors) :])

    return call(*tensors), grad

  results = run(*_tensors(args))
  return _with_tensors(structure[0], results)


def _tensors(nest: Any) -> list[tf.Tensor]:
  """Tensors of a nest that may have None."""
  return [x for x in tf.nest.flatten(nest) if x is not None]


def _with_tensors(nest: Any, tensors: Sequence[tf.Tensor]) -> Any:
  """The nest with these tensors in place of its own; None stays."""
  left = iter(tensors)
  return tf.nest.map_structure(lambda x: None if x is None else next(left), nest)


def again(scope: str) -> str:
  """Name scope of recomputed operations, from the scope of their first run; addons/analysis/parts.py reads it."""
  return f'rematerialised/{scope}/' if scope else 'rematerialised/'
