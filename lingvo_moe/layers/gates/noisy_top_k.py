"""Noisy top-k gate (Shazeer et al., arXiv 1701.06538, section 2.1 and appendix A)."""

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.config import fields
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Constant, Specs, WeightSpec
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing

_NOISE_FLOOR = 1e-2  # added to the standard deviation, as in Tensor2Tensor, where the load divides by it


@dataclasses.dataclass(frozen=True)
class NoisyTopK(gate.Gate):
  """Noisy top-k gate: G(x) = softmax(keep_top_k(H(x))), H(x) = x W + normal noise * softplus(x W_noise).

  Both weights begin at zero, so that all experts get about as many tokens (appendix A). At inference there is no noise.
  Its loss is CV(importance)^2 + CV(load)^2 over the whole batch, on all devices; with micro-batches, over each. The
  paper weights both by 0.1: aux_loss_weight.
  """

  choices: int = 2  # k of a token, less than the number of experts

  joint_loss = True

  def check(self, num_experts: int) -> None:
    check_kept(self, 'noisy_top_k')
    if self.choices >= num_experts:
      rule = f"less than num_experts={num_experts} with gate='noisy_top_k'"
      fields.refuse(self, 'choices', rule, 'noise cannot change who is chosen if all are')

  @property
  def least_experts(self) -> int:
    return self.choices + 1

  def weights(self, model_dim: int, num_experts: int) -> Specs:
    spec = WeightSpec((model_dim, num_experts), 'MJ', Constant(0.0), factored='MJ', float32=True)
    return {'gate': spec, 'gate_noise': spec}

  def experts_per_token(self, num_experts: int) -> float:
    return self.choices

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None) -> Routing:
    real_GS = gate.real_tokens(paddings_GS)
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    raw_noise_GSE = None if keys_GS is None else gate.gate_logits(theta['gate_noise'], x_GSM)
    noisy = noisy_top_k(logits_GSE, raw_noise_GSE, keys_GS, self.choices)
    importance_E = tf.reduce_sum(noisy.gates_GSE * real_GS[..., tf.newaxis], axis=[0, 1])
    load_E = tf.reduce_sum(noisy.load_GSE * real_GS[..., tf.newaxis], axis=[0, 1])
    stats = gate.statistics(logits_GSE, tf.nn.softmax(logits_GSE), real_GS)
    loss = squared_variation(importance_E) + squared_variation(load_E)
    taken_GSR = tf.stack([real_GS] * self.choices, axis=-1)
    stats = stats._replace(aux_loss=stats.groups * loss)
    num_experts = logits_GSE.shape[-1]
    return gate.route(noisy.expert_GSR, noisy.weight_GSR, taken_GSR, num_experts, capacity, stats, noisy.margin_GS)


def check_kept(noisy: gate.Gate, name: str) -> None:
  """Raises a UserError where a noisy gate, of this name, has a single choice."""
  if noisy.choices < 2:
    way_out = 'the softmax over one kept expert is 1, without a gradient'
    fields.refuse(noisy, 'choices', f'2 or more with gate={name!r}', way_out)


class Noisy(NamedTuple):
  """Choices of a noisy top-k gate."""

  expert_GSR: tf.Tensor
  weight_GSR: tf.Tensor  # softmax over the k kept
  gates_GSE: tf.Tensor  # the same weights by expert, 0 for those not kept: G(x)
  load_GSE: tf.Tensor  # P(x, i): probability that expert i is among the k, were its noise drawn again
  margin_GS: tf.Tensor


def noisy_top_k(logits_GSE: tf.Tensor, raw_noise_GSE: tf.Tensor | None, keys_GS: tf.Tensor | None, k: int) -> Noisy:
  """Top k of noisy logits, and the smooth estimate of the load (appendix A, equations 8 to 10).

  Args:
    logits_GSE: x W.
    raw_noise_GSE: x W_noise; None at inference.
    keys_GS: random key of each token; None at inference, where the load is the number of tokens, without gradient.
    k: number kept, less than E.
  """
  num_experts, noisy_GSE = logits_GSE.shape[-1], logits_GSE
  if keys_GS is not None:
    stddev_GSE = tf.nn.softplus(raw_noise_GSE) + _NOISE_FLOOR
    noisy_GSE += prng.normal(prng.fold(keys_GS, 'noise'), sizes(logits_GSE)) * stddev_GSE
  best_GSR = gate.top_choices(noisy_GSE, k + 1)  # and the best that is not kept, for thresholds
  expert_GSR, value_GSR = best_GSR[..., :k], gate.at_choices(noisy_GSE, best_GSR)
  weight_GSR = tf.nn.softmax(value_GSR[..., :k])
  hots_GSE = [tf.one_hot(expert_GSR[..., rank], num_experts) for rank in range(k)]
  gates_GSE = tf.add_n([hots_GSE[rank] * weight_GSR[..., rank, tf.newaxis] for rank in range(k)])
  kept_GSE = tf.add_n(hots_GSE)
  load_GSE = kept_GSE
  if keys_GS is not None:
    # kth_excluding(H(x), k, i): the k-th largest of the others is the k-th of all, or the next one if i is kept itself.
    threshold_GSE = tf.where(kept_GSE > 0, value_GSR[..., k, tf.newaxis], value_GSR[..., k - 1, tf.newaxis])
    load_GSE = _normal_cdf((logits_GSE - threshold_GSE) / stddev_GSE)
  return Noisy(expert_GSR, weight_GSR, gates_GSE, load_GSE, gate.margin(tf.nn.softmax(noisy_GSE), expert_GSR))


def squared_variation(x: tf.Tensor) -> tf.Tensor:
  """Squared coefficient of variation, variance / mean^2 over all elements; 0 where all are zero."""
  mean = tf.reduce_mean(x)
  return tf.reduce_mean(tf.square(x - mean)) / (tf.square(mean) + 1e-10)


def _normal_cdf(x: tf.Tensor) -> tf.Tensor:
  return 0.5 * (1.0 + tf.math.erf(x / math.sqrt(2.0)))
