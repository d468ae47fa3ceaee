"""The experts in training, each on rows of its own, as many as chose it: for a CPU, where no XLA asks for equal numbers."""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.layers.gradient import custom_gradient


def in_rows(x_XM: tf.Tensor, count_E: tf.Tensor, wi_EMH: tf.Tensor, wo_EHM: tf.Tensor) -> tf.Tensor:
  """relu(x wi) wo, by the expert that each row belongs to.

  Every expert is traced by itself, so there should not be too many; those with rows of their own run side by side.

  Args:
    x_XM: rows sorted by expert, and one that is no expert's.
    count_E: int32; how many each expert has. They add up to X - 1.
    wi_EMH: first weights, of x's type.
    wo_EHM: second ones.

  Returns:
    [X, M]. The last row's answer is zeros, and so is the gradient for x's last row, whatever gradient comes in.
  """
  num_experts = wi_EMH.shape[0]
  by_expert = lambda x: tf.split(x, tf.concat([count_E, [1]], axis=0), num=num_experts + 1)[:-1]
  together = lambda y: tf.concat([*y, tf.zeros_like(x_XM[:1])], axis=0)
  each = lambda f, *lists: list(map(f, *lists))
  times_transposed = lambda dy, w: tf.matmul(dy, w, transpose_b=True)
  transposed_times = lambda x, dy: tf.matmul(x, dy, transpose_a=True)
  relu_grad = lambda dh, h: tf.raw_ops.ReluGrad(gradients=dh, features=h)

  @custom_gradient
  def run(x_XM, wi_EMH, wo_EHM):
    x, wi, wo = by_expert(x_XM), tf.unstack(wi_EMH), tf.unstack(wo_EHM)
    h = each(tf.nn.relu, each(tf.matmul, x, wi))

    def grad(dy_XM):
      dy = by_expert(dy_XM)
      dh = each(relu_grad, each(times_transposed, dy, wo), h)
      dx_XM = together(each(times_transposed, dh, wi))
      # First what other layers wait for; then neither weight is in use, and both can be written to. One gradient after the
      # other, for each is large, and is there twice while it is put together.
      with tf.control_dependencies([dx_XM]):
        dwo_EHM = tf.stack(each(transposed_times, h, dy))
      with tf.control_dependencies([dwo_EHM]):
        return dx_XM, tf.stack(each(transposed_times, x, dh)), dwo_EHM

    return together(each(tf.matmul, h, wo)), grad

  return run(x_XM, wi_EMH, wo_EHM)
