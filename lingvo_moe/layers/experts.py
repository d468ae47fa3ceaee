"""Experts asked about rows, each about those of its own tokens, as many as chose it: XLA would want equal numbers.

Rows come sorted by expert, with one more behind them that is no expert's.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.layers.gradient import custom_gradient

# So many experts at most are traced each by itself. That spares what a loop takes for each, but one that has no rows is
# asked as well, and a program of thousands of operations takes long to trace.
_MOST_TRACED = 128

# Of so many at most the gradients of weights are products of their own. More have few rows each: their gradient is one
# einsum 'ECM,ECH->EMH', with as many rows of each expert as any has, which an optimiser can take the factors of. Where it
# does not, as they are too many, that padding costs (7% of a step where 128 experts have up to 128 rows).
_MOST_MULTIPLIED = 64


def answers(x_XM: tf.Tensor, begin_E: tf.Tensor, wi_EMH: tf.Tensor, wo_EHM: tf.Tensor) -> tf.Tensor:
  """relu(x wi) wo, by the expert that each row belongs to: at inference, where a step of decoding has few rows.

  Args:
    x_XM: the rows.
    begin_E: int32; where the rows of expert e begin; as those of e - 1 end there, it has E + 1 entries, the last X - 1.
    wi_EMH: first weights, of x's type.
    wo_EHM: second ones.

  Returns:
    [X, M]. The last row's answer is zeros.
  """
  expert = lambda wi, wo, x: [tf.matmul(tf.nn.relu(tf.matmul(x, wi)), wo)]
  return Looped(begin_E).each(expert, [x_XM.shape[-1]], [wi_EMH, wo_EHM], [x_XM])[0]


def trained_answers(x_XM: tf.Tensor, begin_E: tf.Tensor, wi_EMH: tf.Tensor, wo_EHM: tf.Tensor) -> tf.Tensor:
  """The same with a gradient. That for the last row of x is zeros, whatever gradient comes in for its answer."""
  num_experts, model_dim, hidden_dim = wi_EMH.shape
  on_rows = Traced(begin_E) if num_experts <= _MOST_TRACED else Looped(begin_E)
  features = [hidden_dim, model_dim]

  def forward(wi, wo, x):
    h = tf.nn.relu(tf.matmul(x, wi))
    return h, tf.matmul(h, wo)

  def backward(wi, wo, h, dy):
    dh = tf.raw_ops.ReluGrad(gradients=tf.matmul(dy, wo, transpose_b=True), features=h)
    return dh, tf.matmul(dh, wi, transpose_b=True)

  @custom_gradient
  def run(x_XM, wi_EMH, wo_EHM):
    x = on_rows.divided(x_XM)
    h, y = on_rows.each(forward, features, [wi_EMH, wo_EHM], [x])

    def grad(dy_XM):
      dy = on_rows.divided(dy_XM)
      dh, dx = on_rows.each(backward, features, [wi_EMH, wo_EHM], [h, dy])
      dx_XM = on_rows.joined(dx)
      # First what other layers wait for; then neither weight is in use, and both can be written to.
      with tf.control_dependencies([dx_XM]):
        return dx_XM, *on_rows.products((x, dh), (h, dy))

    return on_rows.joined(y), grad

  return run(x_XM, wi_EMH, wo_EHM)


class OnRows(abc.ABC):
  """How experts are asked about their rows. Each way keeps rows in a form of its own."""

  @abc.abstractmethod
  def divided(self, x_XM: tf.Tensor) -> Any:
    """Rows in that form."""

  @abc.abstractmethod
  def each(self, f: Callable, features: Sequence[int], weights: Sequence[tf.Tensor], rows: Sequence[Any]) -> Sequence:
    """What f(*weights of an expert, *its rows) gives of all experts: rows with so many features each."""

  @abc.abstractmethod
  def joined(self, rows: Any) -> tf.Tensor:
    """[X, ...] of what `each` gave, the last row zeros."""

  @abc.abstractmethod
  def products(self, *factors: tuple[Any, Any]) -> Sequence[tf.Tensor]:
    """x^T dy of each expert, [E, M, H], for each pair (x, dy), of which one comes from `each`."""


@dataclasses.dataclass(frozen=True)
class Traced(OnRows):
  """Every expert by itself, some of them side by side. Rows are a list with those of each."""

  begin_E: tf.Tensor

  def divided(self, x_XM):
    count_E = self.begin_E[1:] - self.begin_E[:-1]
    return tf.split(x_XM, tf.concat([count_E, [1]], axis=0), num=self.begin_E.shape[0])[:-1]

  def each(self, f, features, weights, rows):
    return list(zip(*map(f, *map(tf.unstack, weights), *rows)))

  def joined(self, rows):
    return tf.concat([*rows, tf.zeros([1, rows[0].shape[-1]], rows[0].dtype)], axis=0)

  def products(self, *factors):
    num_experts = self.begin_E.shape[0] - 1
    if num_experts > _MOST_MULTIPLIED:
      return Looped(self.begin_E).products(*((self.joined(x), self.joined(dy)) for x, dy in factors))
    products = []
    for pair in factors:
      # One after the other: each is large, and is there twice while it is put together.
      with tf.control_dependencies(products[-1:]):
        products.append(tf.stack([tf.matmul(x, dy, transpose_a=True) for x, dy in zip(*pair, strict=True)]))
    return products


@dataclasses.dataclass(frozen=True)
class Looped(OnRows):
  """In a loop over those that have rows, several at once, for none waits for another. Rows are [X, ...]."""

  begin_E: tf.Tensor

  def divided(self, x_XM):
    return x_XM

  def each(self, f, features, weights, rows):
    num_busy = tf.size(self._busy_J)

    def ask(i, *found):
      e = tf.gather(self._busy_J, i)
      own = slice(tf.gather(self.begin_E, e), tf.gather(self.begin_E, e + 1))
      found_CM = f(*(w[e] for w in weights), *(x_XM[own] for x_XM in rows))
      return i + 1, *(y_JCM.write(i, y_CM) for y_JCM, y_CM in zip(found, found_CM, strict=True))

    def array(size):
      y_JCM = tf.TensorArray(rows[0].dtype, num_busy + 1, infer_shape=False, element_shape=[None, size])
      return y_JCM.write(num_busy, tf.zeros([1, size], rows[0].dtype))

    found = tf.while_loop(lambda i, *_: i < num_busy, ask, (0, *map(array, features)))[1:]
    return [y_JCM.concat() for y_JCM in found]

  def joined(self, rows):
    return rows

  def products(self, *factors):
    # As many rows of every expert as any has. The last row, of zeros in one of the two, stands for those that are missing.
    rows = tf.range(tf.reduce_max(self.begin_E[1:] - self.begin_E[:-1]))
    index_EC = self.begin_E[:-1, tf.newaxis] + rows
    index_EC = tf.where(index_EC < self.begin_E[1:, tf.newaxis], index_EC, self.begin_E[-1])
    return [tf.einsum('ECM,ECH->EMH', *(tf.gather(x_XM, index_EC) for x_XM in pair)) for pair in factors]

  @functools.cached_property
  def _busy_J(self):
    return tf.cast(tf.where(self.begin_E[1:] > self.begin_E[:-1])[:, 0], tf.int32)
