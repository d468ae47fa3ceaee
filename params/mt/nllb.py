"""NLLB-200 (arXiv 2207.04672), of 202 languages, one vocabulary; see lingvo_moe/addons/interop/m2m100.py.

Dense models of three sizes, which are M2M100's with another vocabulary, and one with experts in every 4th layer.
"""

from lingvo_moe.config import registry
from lingvo_moe.params.mt.m2m100 import M418M, TINY


@registry.register
class Dense600M(M418M):
  """NLLB-200 of 12 + 12 layers, distilled: 615M weights. Published: 615M.

  Result:  not yet run; public weights by lingvo-moe import
  """

  source_vocab_size: int = 256_206


@registry.register
class Dense1B(Dense600M):
  """NLLB-200 of 24 + 24 layers: 1.37B weights. Published: 1.3B.

  Result:  not yet run; public weights by lingvo-moe import
  """

  ff_dim: int = 8192
  encoder_layers: int = 24
  decoder_layers: int = 24


@registry.register
class Dense3B(Dense1B):
  """NLLB-200 of 24 + 24 layers, twice as wide: 3.34B weights. Published: 3.3B.

  Result:  not yet run; public weights by lingvo-moe import
  """

  model_dim: int = 2048
  head_dim: int = 128


@registry.register
class MoE54B(Dense3B):
  """NLLB-MoE, 128 experts in every 4th layer of 24 + 24: 54.5B weights, 3.75B used by a token. Published: 54.5B.

  Result:  not yet run; public weights by lingvo-moe import
  """

  batch_tokens: int = 2**20
  num_groups: int = 128
  num_experts: int = 128
  moe_every: int = 4
  expert_bias: bool = True
  expert_output_scale: float = 0.8
  activation_dtype: str = 'bfloat16'
  dispatch: str = 'einsum'
  scan_layers: bool = True
  remat: str = 'block'


_TINY = {**TINY, 'encoder_layers': 4, 'decoder_layers': 4}
registry.tiny(Dense600M, '94.8k weights', **_TINY)
registry.tiny(MoE54B, '154k weights, 104k used by a token', **_TINY, num_experts=8)
