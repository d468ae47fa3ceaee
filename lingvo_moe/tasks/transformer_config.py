"""Configuration of Transformers: attention, stacks, and which layers have experts.

A task's configuration derives from it, adds its stacks, its data and its decoding, and says in `model()` which model
they make; see tasks/mt/mt_config.py and tasks/lm/lm_config.py.
"""

import dataclasses
import math
from typing import Any, Self

from lingvo_moe.config import fields
from lingvo_moe.config.fields import ON, changeable, field
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import ACTIVATIONS, FeedForward
from lingvo_moe.layers.gates import table as gates
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import NORMS
from lingvo_moe.layers.scanned_stack import ScannedStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.ops.remat import POLICIES
from lingvo_moe.tasks.model_config import EXPERTS_THERE, ModelConfig


@dataclasses.dataclass(frozen=True)
class TransformerConfig(ModelConfig):
  """Transformer: attention and stacks."""

  num_heads: int = field(4, 'N, attention heads.', at_least=1)
  num_kv_heads: int = field(0, 'Key/value heads, a divisor of num_heads; 0: as many.', at_least=0)
  head_dim: int = field(32, 'K, the width of an attention head.', at_least=1)
  moe_every: int = field(
    2, 'Every moe_every-th layer of a stack is a MoE layer; 0: none is.', at_least=0, when={'num_experts': ON}
  )
  scan_layers: bool = changeable(
    False, 'Each stack as one loop over blocks of moe_every layers, so that program size is constant in depth.'
  )
  remat: str = changeable(
    'none',
    'Activations that backprop recomputes. none: no matrix product; attention: those inside attention; block: all of a '
    'layer, or of a block of a scanned stack, but its input.',
    choices=POLICIES,
  )
  attention_dropout: float = field(0.1, 'Dropout of the attention weights.', at_least=0, below=1)
  ffn_dropout: float = field(
    0.0, 'Dropout of the hidden layer of dense feed-forwards.', at_least=0, below=1, when={'has_dense_layers': ON}
  )
  norm: str = field('layer', 'Normalisation: LayerNorm or RMSNorm.', choices=NORMS)
  norm_epsilon: float = field(1e-6, 'Added to variances.', above=0)
  norm_first: bool = field(True, 'Whether residual branches normalise their input; otherwise the sum, as in 2017.')
  post_norm: bool = field(False, 'Whether the output of each residual branch is normalised too, as in Grok-1.')
  bias: bool = field(True, 'Whether attention and dense feed-forward layers have biases.')
  activation: str = field(
    'relu', 'Hidden layer of dense feed-forward layers.', choices=ACTIVATIONS, when={'has_dense_layers': ON}
  )
  attention_scale: float = field(0.0, 'Factor of the scores of attention; 0: K^-0.5.', at_least=0)
  embedding_scale: float = field(0.0, 'Factor of embeddings; 0: the root of model_dim.', at_least=0)
  logit_scale: float = field(1.0, 'Factor of output scores.', above=0)
  logit_bias: bool = field(False, 'Whether every symbol has a bias of its output score.')
  masked_symbols: tuple[int, ...] = field((), 'Ids that the output softmax leaves out.', way_out='e.g. (0,)')
  tied_output: bool = field(True, 'Whether the output softmax shares the embedding of the target.')
  expert_bias: bool = field(False, 'Whether experts have biases, as those of NLLB-200.', when=EXPERTS_THERE)
  expert_output_scale: float = field(1.0, 'Factor of the output of the chosen experts.', above=0, when=EXPERTS_THERE)

  @property
  def has_dense_layers(self) -> bool:
    return not self.num_experts or self.moe_every != 1

  def _check_combinations(self) -> None:
    super()._check_combinations()
    if self.expert_bias and self.expert not in ACTIVATIONS:
      fields.refuse(self, 'expert_bias', f'False with expert={self.expert!r}', 'it is for feed-forward experts')
    self.attention()  # refuses heads that do not divide
    object.__setattr__(self, 'num_kv_heads', self.num_kv_heads % self.num_heads)  # as many: 0

  def attention(self, **values: Any) -> Attention:
    """Attention of every layer; `values` are fields of it."""
    return self.make(Attention, dropout=self.attention_dropout, **values)

  def stack(self, num_layers: int, attention: Attention, moe: MoE | None, **values: Any) -> Stack:
    """Stack of layers, scanned or not; `values` are further fields of a Stack."""
    ffn = self.make(FeedForward, hidden_dim=self.ff_dim, dropout=self.ffn_dropout)
    kind = ScannedStack if self.scan_layers else Stack
    return self.make(kind, num_layers=num_layers, attention=attention, ffn=ffn, moe=moe, norm_type=self.norm, **values)

  def embedding(self, vocab_size: int) -> Embedding:
    return self.make(Embedding, vocab_size=vocab_size)

  def with_share_of_experts(self, share: float) -> Self:
    """Configuration with this share of the experts of each MoE layer, rounded up, for weights without the others.

    Layers are unrolled, as each leaves out experts of its own.
    """
    if not self.num_experts:
      raise UserError('experts are left out of MoE layers; this model is dense: num_experts is 0')
    least = self.moe_gate.least_experts
    if least is None:
      able = ', '.join(name for name in gates.GATES if gates.make(name, self).least_experts)
      raise UserError(f'experts can be left out with the gates {able}; this model has gate={self.gate!r}')
    count = math.ceil(share * self.num_experts - 1e-9)
    if count < least:
      raise UserError(
        f'gate={self.gate!r} chooses among {least} experts or more; saw {count} of num_experts={self.num_experts}: '
        f'keep a share of {least / self.num_experts:.3g} or more'
      )
    return self.with_experts(count)

  def with_experts(self, count: int, **changes: Any) -> Self:
    """Configuration for weights without the other experts; `changes` are further fields of it."""
    if self.groups_of_experts and count < self.num_experts:  # what is left would make other groups
      raise UserError(
        f'experts cannot be left out of groups; this model has groups_of_experts={self.groups_of_experts}: keep all '
        '(or, of a gate by task with feed-forward experts, one language)'
      )
    return dataclasses.replace(self, num_experts=count, scan_layers=False, **changes)

  def _check_stacks(self, **has_experts: bool) -> None:
    """Refuses numbers of layers, by field whether the stack is to have experts, that do not suit moe_every.

    Blocks of a scanned stack must divide its layers; the deepest stack with experts must reach moe_every, or the model
    would be dense.
    """
    period = self.moe_every if self.num_experts and self.moe_every else 1
    for name in has_experts:
      if self.scan_layers and getattr(self, name) % period:
        rule = f'a multiple of moe_every={period} with scan_layers, which repeats blocks of so many'
        fields.refuse(self, name, rule)
    deepest = max(getattr(self, name) for name, experts in has_experts.items() if experts)
    if self.num_experts and self.moe_every > deepest:
      rule = f'at most {deepest}, the layers of the deepest stack that is to have experts'
      fields.refuse(self, 'moe_every', rule, 'num_experts = 0 makes a dense model')
