"""XLA's general convolution, for gradients in GShard's Table 4; imports private modules of TensorFlow."""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tf2xla
from tensorflow.compiler.xla.xla_data_pb2 import ConvolutionDimensionNumbers


def convolution(
  base: tf.Tensor,
  window: tf.Tensor,
  labels: str,
  *,
  strides: Sequence[int],
  padding: Sequence[tuple[int, int]],
  base_dilation: Sequence[int],
  window_dilation: Sequence[int],
) -> tf.Tensor:
  """XLA's general convolution, which dilates base and window; only under XLA. TensorFlow's own operators dilate either.

  Args:
    base: input, with `base_dilation - 1` zeros inserted between its positions, and then padded.
    window: kernel, dilated likewise by `window_dilation`.
    labels: axes of base, window and result in XLA's notation, 'b01f_01io->b01f'.
    strides: of the window, for each spatial axis; so are the other arguments.
    padding: (before, after).
    base_dilation: see base.
    window_dilation: see window.
  """
  of_base, of_window, of_result = labels.replace('->', '_').split('_')
  spatial = lambda axes: [axes.index(str(i)) for i in range(len(strides))]
  numbers = ConvolutionDimensionNumbers(
    input_batch_dimension=of_base.index('b'),
    input_feature_dimension=of_base.index('f'),
    input_spatial_dimensions=spatial(of_base),
    kernel_input_feature_dimension=of_window.index('i'),
    kernel_output_feature_dimension=of_window.index('o'),
    kernel_spatial_dimensions=spatial(of_window),
    output_batch_dimension=of_result.index('b'),
    output_feature_dimension=of_result.index('f'),
    output_spatial_dimensions=spatial(of_result),
  )
  result = tf2xla.conv(base, window, strides, padding, base_dilation, window_dilation, numbers)
  sizes = {'b': base.shape[of_base.index('b')], 'f': window.shape[of_window.index('o')]}
  for i, stride in enumerate(strides):
    axis = str(i)
    long = (base.shape[of_base.index(axis)] - 1) * base_dilation[i] + 1 + sum(padding[i])
    short = (window.shape[of_window.index(axis)] - 1) * window_dilation[i] + 1
    sizes[axis] = (long - short) // stride + 1
  result.set_shape([sizes[axis] for axis in of_result])  # which TensorFlow does not infer
  return result
