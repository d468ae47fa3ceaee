"""GShard's annotated MoE layer as section 3.2 prints it, and with one more annotation: operators for partitioned.py."""

import functools

import tensorflow as tf

from lingvo_moe.layers.gates.top2 import top2_gating
from lingvo_moe.xla_sharding import current, replicate, split
from paper.operators import AA, AG, AR, Operator, Split

_SIZE, _MODEL, _HIDDEN, _CAPACITY = 6, 8, 16, 4  # S, M, H and C; G and E are D


def _layer(x_GSM, gate_ME, wi_EMH, wo_EHM, *, split_weights: bool):
  """The listing line by line, with its three annotations; `split_weights`: combine weights are annotated too."""
  annotated = lambda x: split(x, 0, current().num_devices) if current() else x
  combine_GSEC = _combine_weights(tf.einsum('GSM,ME->GSE', annotated(x_GSM), replicate(gate_ME)))
  if split_weights:
    combine_GSEC = annotated(combine_GSEC)
  x_EGCM = annotated(tf.einsum('GSEC,GSM->EGCM', tf.cast(combine_GSEC > 0, x_GSM.dtype), annotated(x_GSM)))
  h_EGCH = tf.nn.relu(tf.einsum('EGCM,EMH->EGCH', x_EGCM, wi_EMH))
  y_GECM = tf.einsum('EGCH,EHM->GECM', h_EGCH, wo_EHM)
  return tf.einsum('GSEC,GECM->GSM', combine_GSEC, y_GECM)


def _combine_weights(logits_GSE: tf.Tensor) -> tf.Tensor:
  """Algorithm 1's combine weights [G, S, E, C], every second choice kept: for each choice an outer product, summed."""
  routing = top2_gating(logits_GSE, tf.zeros(logits_GSE.shape[:2]), capacity=_CAPACITY)

  def outer(expert_GS, slot_GS, weight_GS):
    experts_GSE, slots_GSC = tf.one_hot(expert_GS, logits_GSE.shape[-1]), tf.one_hot(slot_GS, _CAPACITY)
    return weight_GS[..., None, None] * experts_GSE[..., None] * slots_GSC[:, :, None]

  choices = (tf.unstack(x_GSR, axis=-1) for x_GSR in (routing.expert_GSR, routing.slot_GSR, routing.weight_GSR))
  return tf.add_n([outer(*choice) for choice in zip(*choices)])


def _arguments(devices: int) -> list[Split]:
  inputs, gate = Split((devices, _SIZE, _MODEL), 0), Split((_MODEL, devices))
  return [inputs, gate, Split((devices, _MODEL, _HIDDEN), 0), Split((devices, _HIDDEN, _MODEL), 0)]


_operator = functools.partial(Operator, 'MoE layer', '3.2, listing')
LISTING = (
  _operator(
    'as printed',
    functools.partial(_layer, split_weights=False),
    _arguments,
    0,
    {AG: 7, AR: 1},
    note='XLA leaves the combine weights whole; the number of AG depends on how they are written',
  ),
  _operator(
    'combine weights too',
    functools.partial(_layer, split_weights=True),
    _arguments,
    0,
    {AA: 2},
    note='the AllToAlls of the paper: one before the experts, one after',
  ),
)
