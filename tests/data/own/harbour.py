"""Models of a user's: a gate, experts and a layer of its own, outside the package."""

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.config import registry
from lingvo_moe.config.fields import field
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.layers import experts
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates import gate, table
from lingvo_moe.params.mt import cldr


@dataclasses.dataclass(frozen=True)
class WarmGate(gate.LinearGate):
  """Sends a token to its likeliest expert, at a temperature."""

  gate_temperature: float = 1.0
  least_experts = 1

  def experts_per_token(self, num_experts):
    return 1

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None):
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM) / self.gate_temperature
    gates_GSE, expert_GSR = tf.nn.softmax(logits_GSE), gate.top_choices(logits_GSE, 1)
    real_GS = gate.real_tokens(paddings_GS)
    stats = gate.statistics(logits_GSE, gates_GSE, real_GS)
    stats = stats._replace(aux_loss=gate.balance_loss(gates_GSE, expert_GSR, real_GS))
    weight_GSR, margin_GS = gate.at_choices(gates_GSE, expert_GSR), gate.margin(gates_GSE, expert_GSR)
    return gate.route(expert_GSR, weight_GSR, real_GS[..., None], gates_GSE.shape[-1], capacity, stats, margin_GS)


class ScaledExperts(experts.DeepExperts):
  """Experts of two hidden layers whose outputs are scaled, feature by feature."""

  def weights(self):
    return super().weights() | {'scale': WeightSpec((self.num_experts, self.model_dim), 'EM', Constant(1.0))}

  def __call__(self, theta, x_EGCM, keys_EGC=None):
    without = {name: value for name, value in theta.items() if name != 'scale'}
    return super().__call__(without, x_EGCM, keys_EGC) * theta['scale'][:, None, None]


class NormedFeedForward(FeedForward):
  """Feed-forward layer whose outputs are normalised."""

  def __call__(self, theta, x_BTM, key=None):
    y_BTM = super().__call__(theta, x_BTM, key)
    ones_M = tf.ones([self.model_dim], y_BTM.dtype)
    return ops.layer_norm(y_BTM, ones_M, tf.zeros_like(ones_M), 1e-6)


table.GATES['warm'] = WarmGate
experts.EXPERTS['scaled'] = ScaledExperts


@registry.register
class Tiny(cldr.Tiny):
  """A gate, experts and a layer of a user's own: for tests.

  Result:  not yet run
  """

  gate: str = 'warm'
  expert: str = 'scaled'
  num_experts: int = 4
  gate_temperature: float = field(2.0, 'Divides the logits of the gate.', above=0)

  def model(self):
    model = super().model()
    ffn = NormedFeedForward(self.model_dim, self.ff_dim)
    own = lambda stack: dataclasses.replace(stack, ffn=ffn)
    return dataclasses.replace(model, encoder=own(model.encoder), decoder=own(model.decoder))
