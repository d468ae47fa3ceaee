"""Top-2 gate with capacity: GShard (arXiv 2006.16668), Algorithm 1."""

import dataclasses

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing


@dataclasses.dataclass(frozen=True)
class Top2(gate.LinearGate):
  """Top-2 gate: each token goes to its two likeliest experts, while they have free slots."""

  second_choice: str = 'random'  # taken in training with probability gate / second_choice_threshold; or 'always'
  second_choice_threshold: float = 0.5  # that of the paper: 2 * gate

  balance_over: str = dataclasses.field(default='group', kw_only=True)

  least_experts = 2

  def experts_per_token(self, num_experts: int) -> float:
    return 2

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None) -> Routing:
    noise_GS = None
    if keys_GS is not None and self.second_choice == 'random':
      noise_GS = prng.uniform(keys_GS, sizes(keys_GS))
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    return top2_gating(
      logits_GSE,
      paddings_GS,
      capacity=capacity,
      noise_GS=noise_GS,
      threshold=self.second_choice_threshold,
      balance_over=self.balance_over,
    )


def top2_gating(
  logits_GSE: tf.Tensor,
  paddings_GS: tf.Tensor,
  *,
  capacity: Size | None = None,
  noise_GS: tf.Tensor | None = None,
  threshold: float = 0.5,
  balance_over: str = 'group',
) -> Routing:
  """Top-2 gating, GShard's Algorithm 1.

  Args:
    logits_GSE: float32 scores.
    paddings_GS, capacity: as in Gate.__call__.
    noise_GS: uniform [0, 1); the second choice is kept where gate / threshold > noise. None keeps every one.
    threshold: gate from which on a second choice is always kept: 0.5 is the paper's 2 * gate, 1.0 keeps it with the
      probability of its gate; Lingvo's second_expert_threshold.
    balance_over: 'group' or 'batch'; see gate.balance_loss.

  Returns:
    A Routing with R=2. A token's weights sum to 1 before drops and are not rescaled after.

  Raises:
    ValueError: with fewer than 2 experts or no slot; the message names both and the way out.
  """
  num_experts = logits_GSE.shape[-1]
  if num_experts < 2 or (isinstance(capacity, int) and capacity < 1):
    raise ValueError(
      f'top-2 gating needs 2 experts and 1 slot or more; saw num_experts={num_experts}, capacity={capacity}: '
      'add experts, or raise capacity_factor'
    )
  logits_GSE, real_GS = tf.cast(logits_GSE, tf.float32), gate.real_tokens(paddings_GS)

  # Lines 3-4, 14-15: the softmax and its two largest entries, normalised over the chosen two.
  gates_GSE = tf.nn.softmax(logits_GSE)
  expert_GSR = gate.top_choices(logits_GSE, 2)
  gate1_GS, gate2_GS = tf.unstack(gate.at_choices(gates_GSE, expert_GSR), axis=-1)
  total_GS = gate1_GS + gate2_GS
  gate1_GS, gate2_GS = gate1_GS / total_GS, gate2_GS / total_GS

  # Lines 18-20: the second choice is taken with probability 2 * gate, gate / 0.5. A skipped one takes no slot: a
  # departure from line 22, as in Lingvo, since skipping is meant to save slots.
  taken2_GS, margin_GS = real_GS, gate.margin(gates_GSE, expert_GSR)
  if noise_GS is not None:
    taken2_GS *= tf.cast(gate2_GS / threshold > noise_GS, tf.float32)
    margin_GS = tf.minimum(margin_GS, tf.abs(gate2_GS / threshold - noise_GS))
  # Line 13 counts first choices alone.
  aux_loss = gate.balance_loss(gates_GSE, expert_GSR[..., :1], real_GS, balance_over)
  weight_GSR, taken_GSR = tf.stack([gate1_GS, gate2_GS], axis=-1), tf.stack([real_GS, taken2_GS], axis=-1)
  stats = gate.statistics(logits_GSE, gates_GSE, real_GS)._replace(aux_loss=aux_loss)
  return gate.route(expert_GSR, weight_GSR, taken_GSR, num_experts, capacity, stats, margin_GS)
