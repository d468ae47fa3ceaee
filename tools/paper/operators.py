"""Operators to be partitioned one by one: Table 4 of GShard (arXiv 2006.16668), and its sections 3.3.2, 3.3.3 and A.4.

The letters are the paper's, not those of core/axes.py: A, B and C for axes of matrices; in images B for rows of the
batch, X and Y for positions, I and O for features, x and y for positions in a kernel. The size of a split axis is
proportional to D, as in Table 4, so that the work and communication of a device show how the operator scales.
partitioned.py runs them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe.xla_sharding import shard
from paper.convolution import convolution

AR, AG, AA, CP = 'all-reduce', 'all-gather', 'all-to-all', 'collective-permute'


class Split(NamedTuple):
  """Shape of a tensor, and the axis that is split into D parts; None if every device holds it whole."""

  shape: tuple[int, ...]
  axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Operator:
  """Operator with annotated arguments and result; XLA partitions the computation between them."""

  name: str  # in the paper's notation
  where: str  # place in the paper
  split: str  # the letters that are split, or a description of the split
  function: Callable[..., tf.Tensor]  # of tensors
  arguments: Callable[[int], Sequence[Split]]  # function of D that returns the arguments' shapes and splits
  result: int | None  # axis along which the result is split; None if it is whole on every device
  collectives: Mapping[str, int]  # number of collectives by kind that XLA inserts on 4 devices of a CPU
  compute: str = ''  # growth of a partition's work according to the paper; '' if it gives none
  communication: str = ''  # growth of its communication, likewise
  note: str = ''  # purpose of the case, or how XLA differs from the paper
  reference: Callable[..., tf.Tensor] | None = (
    None  # the same by operators that run without XLA; None: `function` is such
  )


_N = 16  # size of a partition's part of a split axis, and of axes that are not split
_IMAGES, _FEATURES, _KERNEL = 2, 4, 3


def _conv(**settings) -> Callable[..., tf.Tensor]:
  """Convolution by tf.nn.conv2d; by default with stride 1 and a result as large as the image."""
  return lambda image, kernel: tf.nn.conv2d(image, kernel, **{'strides': 1, 'padding': 'SAME', **settings})


def _conv_transpose(stride: int) -> Callable[..., tf.Tensor]:
  """Convolution with base dilation `stride`: over an image with zeros inserted between its positions."""

  def function(image, kernel):
    images, x, y, _ = image.shape
    return tf.nn.conv2d_transpose(image, kernel, [images, stride * x, stride * y, _FEATURES], stride)

  return function


def _dilated(
  strides: int = 1, base: int = 1, window: int = 1, padding: tuple[int, int] = (1, 1)
) -> Callable[..., tf.Tensor]:
  """Convolution with any dilation of base and window; only under XLA."""
  return lambda image, kernel: convolution(
    image,
    kernel,
    'b01f_01io->b01f',
    strides=[strides] * 2,
    padding=[padding] * 2,
    base_dilation=[base] * 2,
    window_dilation=[window] * 2,
  )


def _dilated_by_zeros(strides=1, base=1, window=1, padding=(1, 1)) -> Callable[..., tf.Tensor]:
  """`_dilated` by TensorFlow's own operators, with the zeros written out."""

  def function(image, kernel):
    for axis in (1, 2):
      image = _with_zeros(image, axis, base)
      kernel = _with_zeros(kernel, axis - 1, window)
    image = tf.pad(image, [(0, 0), padding, padding, (0, 0)])
    return tf.nn.conv2d(image, kernel, strides, 'VALID')

  return function


def _with_zeros(x: tf.Tensor, axis: int, dilation: int) -> tf.Tensor:
  """x with dilation - 1 zeros between its positions along an axis."""
  shape = [n * dilation if i == axis else n for i, n in enumerate(x.shape)]
  dilated = tf.reshape(tf.stack([x, *[tf.zeros_like(x)] * (dilation - 1)], axis + 1), shape)
  return tf.gather(dilated, tf.range(shape[axis] - dilation + 1), axis=axis)


def _kernel_gradient(image: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
  """Gradient of the kernel of a convolution of stride 2: over the image, with the dilated upstream gradient."""
  return convolution(
    image,
    upstream,
    'f01b_i01o->01bf',
    strides=[1, 1],
    padding=[(0, 1)] * 2,
    base_dilation=[1, 1],
    window_dilation=[2, 2],
  )


def _kernel_gradient_in_tensorflow(strides: int) -> Callable[..., tf.Tensor]:
  return lambda image, upstream: tf.raw_ops.Conv2DBackpropFilter(
    input=image,
    filter_sizes=[_KERNEL, _KERNEL, _FEATURES, _FEATURES],
    out_backprop=upstream,
    strides=[1, strides, strides, 1],
    padding='SAME',
  )


def _image(size: Callable[[int], int], kernel: int = _KERNEL) -> Callable[[int], Sequence[Split]]:
  """Arguments: images [B, X, Y, I], split along X, and a kernel [x, y, I, O]."""
  return lambda d: [Split((_IMAGES, size(d), 8, _FEATURES), 1), Split((kernel, _KERNEL, _FEATURES, _FEATURES))]


def _rows(size: Callable[[int], int], features: int = 3) -> Callable[[int], Sequence[Split]]:
  """Arguments: one matrix, split along its rows."""
  return lambda d: [Split((size(d), features), 0)]


_even = lambda d: _N * d
_uneven = lambda d: _N * d - 3  # the last partition has three rows fewer

TABLE_4 = (
  Operator(
    'Add(A,A->A)', 'Table 4', 'A', tf.add, lambda d: [Split((_N * d,), 0), Split((_N * d,), 0)], 0, {}, 'O(1)', '0'
  ),
  Operator(
    'Matmul(AB,BC->AC)',
    'Table 4, Figure 4b',
    'B',
    tf.matmul,
    lambda d: [Split((_N, _N * d), 1), Split((_N * d, _N), 0)],
    None,
    {AR: 1},
    'O(1)',
    'O(1) AR',
  ),
  Operator(
    'Matmul(AB,BC->AC)',
    'Table 4',
    'A',
    tf.matmul,
    lambda d: [Split((_N * d, _N), 0), Split((_N, _N))],
    0,
    {},
    'O(1)',
    '0',
  ),
  Operator(
    'Matmul(AB,BC->AC)',
    'Table 4, Figure 4c',
    'A, B',
    tf.matmul,
    lambda d: [Split((_N * d, _N * d), 0), Split((_N * d, _N), 0)],
    0,
    {AG: 1},
    'O(D)',
    'O(D) AG or CP',
    'AG; on TPUs CP where the operand is large, see below',
  ),
  Operator(
    'Matmul(AB,BC->AC)',
    'Table 4, Figure 4c',
    'A, C',
    tf.matmul,
    lambda d: [Split((_N * d, _N), 0), Split((_N, _N * d), 1)],
    0,
    {AG: 1},
    'O(D)',
    'O(D) AG or CP',
    'likewise',
  ),
  Operator('Reduce(AB->A)', 'Table 4', 'A', lambda x: tf.reduce_sum(x, 1), _rows(_even, _N), 0, {}, 'O(1)', '0'),
  Operator(
    'Reduce(AB->B)', 'Table 4', 'A', lambda x: tf.reduce_sum(x, 0), _rows(_even, _N), None, {AR: 1}, 'O(1)', 'O(1) AR'
  ),
  Operator(
    'Einsum(GSEC,GSM->EGCM)',
    'Table 4, Figure 4a',
    'G, then E',
    lambda dispatch, x: tf.einsum('GSEC,GSM->EGCM', dispatch, x),
    lambda d: [Split((d, 64, d, 64 // d), 0), Split((d, 64, 8), 0)],  # one group and one expert a device, C = O(1/D)
    0,
    {AA: 1},
    'O(1)',
    'O(sqrt D) AA',
    'the bytes are O(1), and go O(sqrt D) hops (Figure 9)',
  ),
  Operator(
    'Convolution(BIXY,xyIO->BOXY)',
    'Table 4, Figure 5a',
    'X',
    _conv(),
    _image(_even),
    1,
    {CP: 2},
    'O(1)',
    'O(1) CP',
    'a halo from either side',
  ),
)

COMMUNICATION = (
  Operator(
    'Matmul(AB,BC->AC)',
    '3.3.2',
    'B, the result A',
    tf.matmul,
    lambda d: [Split((_N * d, _N * d), 1), Split((_N * d, _N), 0)],
    0,
    {AR: 1},
    note='XLA reduces everywhere and slices; a ReduceScatter would send half',
  ),
  Operator('Copy(AB->AB)', '3.3.1', 'A, the result whole', tf.identity, _rows(_even), None, {AG: 1}),
  Operator('Copy(AB->AB)', '3.3.1', 'A, the result B', tf.identity, lambda d: [Split((_N * d, _N * d), 0)], 1, {AA: 1}),
  Operator(
    'Copy(AB->AB)',
    '3.3.1, Figure 10',
    'A, devices in reverse order',
    lambda x: shard(x, np.arange(x.shape[0] // _N)[::-1, None]),
    _rows(_even),
    0,
    {CP: 2},
    note='there, and back to the order of the result',
  ),
)

WINDOWS = (
  Operator('Convolution', 'A.4', 'X; stride 2', _conv(strides=2), _image(_even), 1, {CP: 1}),
  Operator('Convolution', 'A.4', 'X; window dilation 2', _conv(dilations=2), _image(_even), 1, {CP: 2}),
  Operator(
    'Convolution',
    'A.4, Figure 11',
    'X in parts of 3 and 2; stride 2',
    _conv(strides=2, padding=[(0, 0), (1, 1), (1, 1), (0, 0)]),
    _image(lambda d: 3 * d),
    1,
    {CP: 1},
    note='12 positions, window 3, padding 1 + 1: partition i lacks 1 - i rows on the left, which are padding, and '
    'i + 1 on the right',
  ),
  Operator(
    'Convolution',
    'A.4',
    'X; a kernel of 5, no padding',
    _conv(padding='VALID'),
    _image(_even, kernel=5),
    1,
    {CP: 2},
    note='partition i of 4 needs i rows from the left and 3 - i from the right, as its result has 15 rows of 60: the '
    'largest halos are sent, and what is not needed is sliced off',
  ),
  Operator(
    'Convolution', 'A.4', 'X, uneven', _conv(), _image(_uneven), 1, {CP: 2}, note='what is beyond the end is masked'
  ),
  Operator('Convolution', 'A.4', 'X, uneven; stride 2', _conv(strides=2), _image(_uneven), 1, {CP: 1}),
  Operator(
    'Convolution',
    'A.4',
    'X, uneven; stride 3, no padding',
    _conv(strides=3, padding='VALID'),
    _image(_uneven),
    1,
    {CP: 1},
  ),
  Operator(
    'Convolution',
    'A.4',
    'X in parts of 1; a kernel of 5',
    _conv(),
    _image(lambda d: d, kernel=5),
    1,
    {AG: 1},
    note='halos from beyond the neighbours: XLA gathers the image, and on 8 devices sends them by 4 CP',
  ),
  Operator(
    'Convolution',
    'A.4, Figure 13',
    'X; base dilation 2',
    _conv_transpose(2),
    _image(_even),
    1,
    {CP: 1},
    note='first case: a partition begins at the same place of the dilation as every other',
  ),
  Operator(
    'Convolution',
    'A.4, Figure 13',
    'X, uneven; base dilation 3',
    _conv_transpose(3),
    _image(_uneven),
    1,
    {CP: 1},
    note='second case: stride 1, and partitions begin at different places',
  ),
  Operator(
    'Convolution',
    'A.4, Figure 13',
    'X; base dilation 3, stride 2',
    _dilated(strides=2, base=3),
    _image(_even),
    1,
    {},
    note='first case, with a stride: its windows need no halo',
    reference=_dilated_by_zeros(strides=2, base=3),
  ),
  Operator(
    'Convolution',
    'A.4, Figure 13',
    'X; base dilation 2, stride 3',
    _dilated(strides=3, base=2),
    _image(_even),
    1,
    {AG: 1},
    note='third case: another stride, and partitions begin at different places; XLA gathers the image, where the paper '
    'pads the window',
    reference=_dilated_by_zeros(strides=3, base=2),
  ),
  Operator(
    'Convolution, Slice',
    'A.4, Figure 13',
    'X; base dilation 2, then every third',
    lambda image, kernel: _dilated(base=2)(image, kernel)[:, ::3, ::3],
    _image(_even),
    1,
    {CP: 2},
    note='the third case as the first one and a slice: nine times the work, and a halo in place of the image',
    reference=_dilated_by_zeros(strides=3, base=2),
  ),
  Operator(
    'Convolution',
    'A.4',
    'X; base dilation 2, window dilation 2',
    _dilated(base=2, window=2, padding=(2, 2)),
    _image(_even),
    1,
    {CP: 2},
    reference=_dilated_by_zeros(base=2, window=2, padding=(2, 2)),
  ),
  Operator(
    "Convolution's gradient of the kernel",
    'A.4',
    'X',
    _kernel_gradient_in_tensorflow(1),
    lambda d: [Split((1, _N * d, 8, _FEATURES), 1)] * 2,
    None,
    {AR: 1, CP: 2},
  ),
  Operator(
    "Convolution's gradient of the kernel",
    'A.4',
    'X; stride 2',
    _kernel_gradient,
    lambda d: [Split((1, _N * d, 8, _FEATURES), 1), Split((1, _N * d // 2, 4, _FEATURES), 1)],
    None,
    {AR: 1, CP: 1},
    note='the right-hand side is dilated and split',
    reference=_kernel_gradient_in_tensorflow(2),
  ),
  Operator(
    'ReduceWindow(max)',
    'A.4',
    'X',
    lambda x: tf.nn.max_pool2d(x, 3, 1, 'SAME'),
    lambda d: _image(_even)(d)[:1],
    1,
    {CP: 2},
  ),
  Operator(
    'ReduceWindow(max)',
    'A.4',
    'X, uneven; stride 2',
    lambda x: tf.nn.max_pool2d(x, 3, 2, 'SAME'),
    lambda d: _image(_uneven)(d)[:1],
    1,
    {CP: 1},
  ),
)

UNEVEN = (
  Operator(
    'Reduce(AB->B)',
    '3.3.3',
    'A, uneven',
    lambda x: tf.reduce_sum(x, 0),
    _rows(_uneven),
    None,
    {AR: 1},
    note='padding is masked with 0',
  ),
  Operator(
    'Reduce(AB->B), max',
    '3.3.3',
    'A, uneven',
    lambda x: tf.reduce_max(x, 0),
    _rows(_uneven),
    None,
    {AR: 1},
    note='padding is masked with -inf',
  ),
  Operator(
    'Matmul(AB,BC->AC)',
    '3.3.3',
    'B, uneven',
    tf.matmul,
    lambda d: [Split((_N, _uneven(d)), 1), Split((_uneven(d), _N), 0)],
    None,
    {AR: 1},
  ),
  Operator(
    'Slice', '3.3.3, Figure 5b', 'A; 5 off the start', lambda x: x[5:], _rows(_even), 0, {CP: 1}, note='parts move'
  ),
  Operator(
    'Pad',
    '3.3.3, Figure 5b',
    'A; 3 before and 1 after',
    lambda x: tf.pad(x, [[3, 1], [0, 0]]),
    _rows(_even),
    0,
    {CP: 1},
  ),
  Operator('Reverse', '3.3.3', 'A', lambda x: tf.reverse(x, [0]), _rows(_even), 0, {CP: 1}),
  Operator(
    'Reverse',
    '3.3.3',
    'A, uneven',
    lambda x: tf.reverse(x, [0]),
    _rows(_uneven),
    0,
    {CP: 2},
    note='and a shift, so that padding stays at the end',
  ),
  Operator('Reshape(AB->C)', '3.3.3', 'A', lambda x: tf.reshape(x, [-1]), _rows(_even), 0, {}),
  Operator(
    'Reshape(AB->C)', '3.3.3, Figure 5c', 'A, uneven', lambda x: tf.reshape(x, [-1]), _rows(_uneven), 0, {CP: 1}
  ),
)

OPERATORS = TABLE_4 + COMMUNICATION + WINDOWS + UNEVEN


def large(operator: Operator, size: int = 2**14) -> Operator:
  """Operator with `size` along every axis of its arguments, for any D: to be compiled, not run."""
  arguments = lambda d: [Split((size,) * len(x.shape), x.axis) for x in operator.arguments(d)]
  return dataclasses.replace(operator, arguments=arguments)
