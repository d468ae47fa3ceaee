"""OPUS-MT (Tiedemann and Thottingal, EAMT 2020): Marian models of 1,400 pairs of languages, github.com/Helsinki-NLP.

Transformer Base of Marian, one vocabulary of 58,100 pieces and pad; see lingvo_moe/addons/interop/marian.py.
"""

from lingvo_moe.config import registry
from lingvo_moe.params.mt.m2m100 import TINY
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class Base(MtConfig):
  """OPUS-MT's Transformer Base: 73.9M weights. Published: opus-mt-en-de, 74.4M with two tables of 512 sinusoids.

  Result:  not yet run; public weights by lingvo-moe import
  """

  source_vocab_size: int = 58_102
  shared_vocab: bool = True
  max_length: int = 512
  model_dim: int = 512
  ff_dim: int = 2048
  num_heads: int = 8
  head_dim: int = 64
  encoder_layers: int = 6
  decoder_layers: int = 6
  activation: str = 'swish'
  norm_first: bool = False
  norm_epsilon: float = 1e-5
  position_endpoint: bool = False
  logit_bias: bool = True


registry.tiny(Base, '52.5k weights', **TINY)
