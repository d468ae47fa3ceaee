"""Attention by cuDNN's kernels, for programs that are exported for NVIDIA GPUs: no scores in memory.

XLA's GPU compiler knows them as custom calls (`__cudnn$fmha...`). Compiled for an H100, not run on one.
"""

import dataclasses
import json
import warnings

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.shapes import sizes
from lingvo_moe.ops import reference, softmax_attention, xla
from lingvo_moe.ops.custom_gradient import custom_gradient

_NOT_BY_CUDNN = (
  "some attention is computed without cuDNN's kernels, which are for bfloat16, heads of a multiple of 8 features up to "
  '128, and even lengths, without dropout of weights, relative positions, capped scores and weights that are asked for'
)

CALLS = ('__cudnn$fmhaScaleBiasSoftmax', '__cudnn$fmhaScaleBiasSoftmaxBackward')

# Axes of products of [B, N, T, K] and [B, N, T, U]: those of x and y that are summed over; B and N are in all tensors.
_FORWARD = {'bmm1': (3, 3), 'bmm2': (3, 2)}
_BACKWARD = {'bmm1_grad_gemm1': (2, 2), 'bmm1_grad_gemm2': (3, 2), 'bmm2_grad_gemm1': (2, 2), 'bmm2_grad_gemm2': (3, 3)}


def attention(q_BnTK, keys_BNUK, values_BNUK, mask_BTU, relative_BnTU=None, key=None, **settings):
  """Attention by cuDNN in bfloat16 with any mask; see softmax_attention.attention, which computes what cuDNN has not.

  That is dropout, whose numbers cuDNN would repeat at each step; relative positions; a cap of scores; weights that are
  asked for; heads of more than 128 features, or of a number that 8 does not divide; an odd number of positions.
  """
  if not supported(q_BnTK, keys_BNUK, relative_BnTU, key, **settings):
    warnings.warn(_NOT_BY_CUDNN, stacklevel=2)  # shown once
    return softmax_attention.attention(q_BnTK, keys_BNUK, values_BNUK, mask_BTU, relative_BnTU, key, **settings)
  heads = q_BnTK.shape[1:-2]
  rows, length, features = sizes(q_BnTK)[0], q_BnTK.shape[-2], q_BnTK.shape[-1]
  bias_B1TU = tf.broadcast_to(
    tf.cast((1.0 - tf.cast(mask_BTU, tf.float32)) * reference.MASKED, q_BnTK.dtype)[:, tf.newaxis],
    [rows, 1, length, keys_BNUK.shape[2]],
  )
  q_BNTK = tf.reshape(q_BnTK, [rows, -1, length, features])  # query heads that share a key stand side by side
  y_BNTK = _fused(q_BNTK, keys_BNUK, values_BNUK, bias_B1TU)
  y_BnTK = tf.reshape(y_BNTK, [rows, *heads, length, features])
  return tf.einsum('BNTK->BTNK' if len(heads) == 1 else 'BNQTK->BTNQK', y_BnTK), None


def supported(q_BnTK, keys_BNUK, relative_BnTU, key, dropout=0.0, logit_cap=0.0, with_weights=False) -> bool:
  """Whether cuDNN has this attention."""
  plain = relative_BnTU is None and not (dropout and key is not None) and not logit_cap and not with_weights
  features, lengths = q_BnTK.shape[-1], (q_BnTK.shape[-2], keys_BNUK.shape[2])
  return (
    plain and q_BnTK.dtype == tf.bfloat16 and features % 8 == 0 and features <= 128 and not any(n % 2 for n in lengths)
  )


@custom_gradient
def _fused(q_BNTK, keys_BNUK, values_BNUK, bias_B1TU):
  operands = q_BNTK, keys_BNUK, values_BNUK
  log_sums = sizes(q_BNTK)[:3]
  y_BNTK, log_sum_BNT = _call(False, [*operands, bias_B1TU], [q_BNTK.shape, log_sums], [q_BNTK.dtype, tf.float32])

  def grad(dy_BNTK):
    given = [*operands, log_sum_BNT, dy_BNTK, bias_B1TU, y_BNTK]
    return *_call(True, given, [x.shape for x in operands], [x.dtype for x in operands]), None

  return y_BNTK, grad


def _call(backward: bool, operands, shapes, dtypes) -> list[tf.Tensor]:
  """Results of cuDNN's forward or backward kernel; the workspace, which comes last, is left out."""
  q_BNTK, keys_BNUK = operands[:2]
  scores = [*sizes(q_BNTK)[:3], keys_BNUK.shape[2]]
  products = _BACKWARD if backward else _FORWARD
  config = {
    'fmha_scale': 1.0,
    'dropout_rate': 0.0,
    'seed': 0,
    'mask_type': 'NO_MASK',  # the bias is the mask
    'sliding_window_length': 0,
    'max_seg_per_batch': 1,
    'is_paged_attention': False,
    'is_flash_attention': True,
    'intermediate_tensor_shape': {
      'element_type': 'BF16',
      'dimensions': [str(size) for size in scores],
      'layout': {'minor_to_major': ['3', '2', '1', '0']},
      'is_dynamic_dimension': [False] * 4,
    },
    'algorithm': {'algo_id': '0', 'math_type': 'TENSOR_OP_MATH', 'is_cudnn_frontend': True, 'workspace_size': '0'},
    **{f'{name}_dot_dimension_numbers': _dimensions(*summed) for name, summed in products.items()},
  }
  specs = [tf.TensorSpec(shape, dtype) for shape, dtype in zip([*shapes, [0]], [*dtypes, tf.uint8], strict=True)]
  config = json.dumps({'operation_queue_id': '0', 'cudnn_fmha_backend_config': config})
  return xla_sharding.custom_call(CALLS[backward], operands, specs, config)[:-1]


def _dimensions(of_x: int, of_y: int) -> dict[str, list[str]]:
  """Axes of a product that are summed over, and those that both have."""
  both = ['0', '1']
  return {
    'lhs_contracting_dimensions': [str(of_x)],
    'rhs_contracting_dimensions': [str(of_y)],
    'lhs_batch_dimensions': both,
    'rhs_batch_dimensions': both,
  }


BACKEND = dataclasses.replace(xla.BACKEND, overrides={**xla.OVERRIDES, 'attention': attention})
