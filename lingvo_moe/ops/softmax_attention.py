"""Softmax attention: from queries, keys and values to their weighted sums, which a machine may compute at once."""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.ops import reference
from lingvo_moe.ops.backend import operation
from lingvo_moe.ops.remat import keep

attention_product = operation(reference.attention_product)
masked_scores = operation(reference.masked_scores)


def head_letters(heads: Sequence[int]) -> str:
  """Axis letters of query heads, (N,) or (key/value heads, query heads of each): a mesh splits the longer axis, N."""
  return 'N' if len(heads) == 1 else 'NQ' if heads[0] >= heads[1] else 'JN'


def heads_first(x_BTnK: tf.Tensor) -> tf.Tensor:
  """Transpose to [B, N, T, K], of queries, keys or values; n in names is N, or N Q if Q query heads share a key.

  A product with this result would instead transpose larger operands of its gradients.
  """
  n = 'N' if x_BTnK.shape.rank == 4 else 'NQ'
  return tf.einsum(f'BT{n}K->B{n}TK', x_BTnK)


def attention(
  q_BnTK: tf.Tensor,
  keys_BNUK: tf.Tensor,
  values_BNUK: tf.Tensor,
  mask_BTU: tf.Tensor,
  relative_BnTU: tf.Tensor | None = None,
  key: tf.Tensor | None = None,
  *,
  dropout: float = 0.0,
  logit_cap: float = 0.0,
  with_weights: bool = False,
) -> tuple[tf.Tensor, tf.Tensor | None]:
  """Attention softmax(q keys) values, [B, T, n, K] (Vaswani et al., 2017, equation 1), and its weights or None.

  Args:
    q_BnTK: queries, scaled.
    keys_BNUK: keys; tensors, or what write_cache of the same backend returned.
    values_BNUK: values, likewise.
    mask_BTU: true (1) where T may attend to U; axes of length one broadcast.
    relative_BnTU: what is added to scores, and gets a gradient; axis B may be of length one. None: nothing.
    key: random key of the dropout, a scalar or one for each row; None: none.
    dropout: dropout of the weights.
    logit_cap: largest magnitude of a score, which becomes cap * tanh(score / cap); 0: no limit.
    with_weights: whether the weights are returned, before their dropout: float32 [B, n, T, U], which sum to 1 over U.
  """
  n = 'B' + head_letters(q_BnTK.shape[1:-2])
  scores_BnTU = keep(attention_product(f'{n}TK,B{n[1]}UK->{n}TU', q_BnTK, keys_BNUK), f'{n}TU')
  scores_BnTU = tf.cast(scores_BnTU, tf.float32)
  if logit_cap:
    scores_BnTU = logit_cap * tf.tanh(scores_BnTU / logit_cap)
  if relative_BnTU is not None:
    scores_BnTU += tf.cast(relative_BnTU, tf.float32)
  mask_BnTU = mask_BTU[:, tf.newaxis] if n == 'BN' else mask_BTU[:, tf.newaxis, tf.newaxis]
  weights_BnTU = tf.nn.softmax(masked_scores(scores_BnTU, mask_BnTU))
  probs_BnTU = prng.dropout(tf.cast(weights_BnTU, q_BnTK.dtype), dropout, key)
  y_BnTK = keep(attention_product(f'{n}TU,B{n[1]}UK->{n}TK', probs_BnTU, values_BNUK), f'{n}TK')
  y_BTnK = tf.einsum(f'{n}TK->BT{n[1:]}K', y_BnTK)
  return y_BTnK, weights_BnTU if with_weights else None
