"""T5 (Raffel et al., arXiv 1910.10683) as a model of text to text; see lingvo_moe/addons/interop/t5.py."""

from lingvo_moe.config import registry
from lingvo_moe.params.mt.m2m100 import TINY
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class Base(MtConfig):
  """T5-Base: 223M weights. Published: 220M (t5-base has 222.9M).

  Result:  not yet run; public weights by lingvo-moe import
  """

  source_vocab_size: int = 32_129
  shared_vocab: bool = True
  max_length: int = 512
  model_dim: int = 768
  ff_dim: int = 3072
  num_heads: int = 12
  head_dim: int = 64
  encoder_layers: int = 12
  decoder_layers: int = 12
  norm: str = 'rms'
  bias: bool = False
  positions: str = 'relative'
  shared_relative: bool = True
  attention_scale: float = 1.0
  embedding_scale: float = 1.0
  logit_scale: float = 768**-0.5


registry.tiny(Base, '51.2k weights', **TINY, logit_scale=32**-0.5)
