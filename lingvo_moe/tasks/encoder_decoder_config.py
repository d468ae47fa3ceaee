"""Configuration of an encoder-decoder Transformer: its stacks and positions."""

import dataclasses
from typing import Any

from lingvo_moe.config import fields
from lingvo_moe.config.fields import field
from lingvo_moe.layers.embedding import Embedding, Sinusoids
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.positions import POSITIONS, PositionBias
from lingvo_moe.models.encoder_decoder import EncoderDecoder
from lingvo_moe.tasks.model_config import EXPERTS_THERE
from lingvo_moe.tasks.transformer_config import TransformerConfig

_RELATIVE = {'positions': ('relative',)}


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(TransformerConfig):
  """Encoder-decoder: stacks and positions."""

  encoder_layers: int = field(4, 'Layers of the encoder.', at_least=1, at_most=10_000)
  decoder_layers: int = field(4, 'Layers of the decoder.', at_least=1, at_most=10_000)
  experts_in: str = field(
    'both', 'Stacks that have MoE layers.', choices=('both', 'encoder', 'decoder'), when=EXPERTS_THERE
  )
  joined_experts: int = field(
    0,
    'Experts that lingvo-moe export --keep_languages made one dense layer of, in the place of each MoE layer; 0: none.',
    at_least=0,
  )
  positions: str = field(
    'sinusoidal',
    'Positions: sinusoids that are added to embeddings, or relative biases of self-attention (T5).',
    choices=POSITIONS,
  )
  position_offset: int = field(
    0, 'Position of the first symbol in the sinusoids.', at_least=0, when={'positions': ('sinusoidal',)}
  )
  position_endpoint: bool = field(
    True,
    'Whether the longest wavelength of the sinusoids is 20000 pi; otherwise that of one more would be.',
    when={'positions': ('sinusoidal',)},
  )
  relative_buckets: int = field(32, 'Buckets of relative positions.', at_least=4, when=_RELATIVE)
  relative_distance: int = field(128, 'Distance from which on all are in one bucket.', at_least=2, when=_RELATIVE)
  shared_relative: bool = field(
    False, 'Whether the layers of a stack share their relative biases, as in T5.', when=_RELATIVE
  )

  @property
  def has_dense_layers(self) -> bool:
    return super().has_dense_layers or self.experts_in != 'both'

  @property
  def causal_experts(self) -> bool:
    return bool(self.num_experts) and self.experts_in != 'encoder'

  def _check_combinations(self) -> None:
    super()._check_combinations()
    self._check_stacks(encoder_layers=self.experts_in != 'decoder', decoder_layers=self.experts_in != 'encoder')
    if self.shared_relative and self.scan_layers:
      fields.refuse(self, 'shared_relative', 'False with scan_layers', 'a loop has the weights of each layer by itself')
    if self.joined_experts and (self.num_experts or self.scan_layers):
      fields.refuse(self, 'joined_experts', '0 with num_experts or scan_layers')
    for is_decoder in (False, True):
      self._relative(is_decoder)  # refuses a distance that is too short

  def encoder_decoder(self, source: Embedding | None, target: Embedding, **values: Any) -> EncoderDecoder:
    """The model, given the embeddings of its sides; None: the source shares that of the target."""
    moe = self.moe()
    stack = lambda name, layers, is_decoder: self.stack(
      layers,
      self.attention(relative=self._relative(is_decoder)),
      moe if self.experts_in in ('both', name) else None,
      cross_attention=is_decoder,
      shared_relative=self.shared_relative and self.positions == 'relative',
      joined=self._joined() if self.experts_in in ('both', name) else None,
    )
    return self.make(
      EncoderDecoder,
      encoder=stack('encoder', self.encoder_layers, False),
      decoder=stack('decoder', self.decoder_layers, True),
      source_embedding=source,
      target_embedding=target if self.tied_output else dataclasses.replace(target, logit_bias=False),
      output_embedding=None if self.tied_output else target,
      sinusoidal=self.positions == 'sinusoidal',
      sinusoids=Sinusoids(self.position_offset, self.position_endpoint)
      if self.positions == 'sinusoidal'
      else Sinusoids(),
      **values,
    )

  def _joined(self) -> FeedForward | None:
    if not self.joined_experts:
      return None
    hidden_dim = self.joined_experts * (self.expert_dim or self.ff_dim)
    return FeedForward(self.model_dim, hidden_dim, activation=self.expert, bias=self.expert_bias)

  def _relative(self, is_decoder: bool) -> PositionBias | None:
    return POSITIONS[self.positions](self, is_decoder)
