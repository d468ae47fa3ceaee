"""GLaM (Du et al., arXiv 2112.06905): decoders with experts in every other layer, up to 1.2T weights.

Its table 4: 64B/64E has 64 layers, M=8192, H=32768, 128 heads of 128, 64 experts of which a token visits two, 1.2T
weights and 96.6B used by a token. Section 4: dense layers are gated by a GELU, experts are not; vocabulary 256K;
context 1024; batch of 1M tokens; Adafactor with beta1 0 and a learning rate of 0.01 for 10K steps, then 1 / sqrt(t);
auxiliary loss 0.01; no dropout. Departures: positions are rotary, not a bias by distance; beta2 of Adafactor has this
repository's cap of 0.99.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.lm.lm_config import LmConfig


@registry.register
class Glam64B64E(LmConfig):
  """GLaM (64B/64E): 1.16T weights, 96.6B used by a token. Table 4 says 1.2T and 96.6B.

  Result:  not yet run
  """

  vocab: str = 'pieces'
  vocab_size: int = 256_000
  documents: str = 'paragraph'
  packing: bool = True
  window: int = 1024
  batch_tokens: int = 2**20
  num_groups: int = 1024
  num_layers: int = 64
  model_dim: int = 8192
  ff_dim: int = 32_768
  num_heads: int = 128
  head_dim: int = 128
  num_experts: int = 64
  activation: str = 'geglu'
  expert: str = 'gelu'
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  label_smoothing: float = 0.0
  activation_dtype: str = 'bfloat16'
  dispatch: str = 'einsum'
  scan_layers: bool = True
  remat: str = 'block'


registry.tiny(
  Glam64B64E,
  '57.1k weights, 32.5k used by a token',
  vocab_size=300,
  window=32,
  batch_tokens=256,
  num_groups=4,
  num_layers=2,
  model_dim=32,
  ff_dim=64,
  num_heads=4,
  head_dim=8,
  num_experts=8,
  max_steps=20,
)
