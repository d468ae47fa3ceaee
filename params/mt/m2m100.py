"""M2M100 (Fan et al., arXiv 2010.11125): any to any of 100 languages; see lingvo_moe/addons/interop/m2m100.py.

Tags of both languages: that of the source before it, that of the target as the first symbol of the translation, behind
eos.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class M418M(MtConfig):
  """M2M100 of 12 + 12 layers: 484M weights. Published: 418M; its checkpoint has 484M.

  Result:  not yet run; public weights by lingvo-moe import
  """

  source_vocab_size: int = 128_112
  shared_vocab: bool = True
  tag_target: bool | None = True
  tag_sides: str = 'both'
  begin: str = 'eos'
  max_length: int = 512
  model_dim: int = 1024
  ff_dim: int = 4096
  num_heads: int = 16
  head_dim: int = 64
  encoder_layers: int = 12
  decoder_layers: int = 12
  norm_epsilon: float = 1e-5
  position_offset: int = 2


@registry.register
class M1B(M418M):
  """M2M100 of 24 + 24 layers: 1.24B weights. Published: 1.2B.

  Result:  not yet run; public weights by lingvo-moe import
  """

  ff_dim: int = 8192
  encoder_layers: int = 24
  decoder_layers: int = 24


# Sizes of tiny siblings of public models.
TINY = dict(
  source_vocab_size=300,
  max_length=64,
  batch_tokens=256,
  num_groups=4,
  model_dim=32,
  ff_dim=64,
  num_heads=4,
  head_dim=8,
  encoder_layers=2,
  decoder_layers=2,
  max_steps=20,
)
registry.tiny(M418M, '52.3k weights', **TINY)
