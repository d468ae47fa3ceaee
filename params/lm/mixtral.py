"""Mixtral (Jiang et al., arXiv 2401.04088): 32 layers of eight SwiGLU experts, of which a token visits two."""

from lingvo_moe.config import registry
from lingvo_moe.tasks.lm.lm_config import LmConfig


@registry.register
class Mixtral8x7B(LmConfig):
  """Mixtral 8x7B: 46.7B weights, 12.7B used by a token. Published: 47B, 13B.

  Result:  not yet run; public weights by lingvo-moe import
  """

  vocab: str = 'pieces'
  vocab_size: int = 32_001
  documents: str = 'paragraph'
  packing: bool = True
  window: int = 4096
  batch_tokens: int = 64 * 4096
  num_groups: int = 64
  num_layers: int = 32
  model_dim: int = 4096
  ff_dim: int = 14_336
  num_heads: int = 32
  num_kv_heads: int = 8
  head_dim: int = 128
  rotary_base: float = 1e6
  norm_epsilon: float = 1e-5
  embedding_scale: float = 1.0
  tied_output: bool = False
  num_experts: int = 8
  moe_every: int = 1
  gate: str = 'top_k'
  expert: str = 'swiglu'
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  label_smoothing: float = 0.0
  activation_dtype: str = 'bfloat16'
  dispatch: str = 'einsum'
  scan_layers: bool = True
  remat: str = 'block'


registry.tiny(
  Mixtral8x7B,
  '124k weights',
  vocab_size=300,
  window=32,
  batch_tokens=256,
  num_groups=4,
  num_layers=2,
  model_dim=32,
  ff_dim=64,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  max_steps=20,
)
