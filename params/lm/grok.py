"""Grok-1 (github.com/xai-org/grok-1, released March 2024): 314B weights, 8 experts of which a token visits two.

Its run.py and model.py: 64 layers, all with experts; M=6144; 48 query heads and 8 key/value heads of 128; experts are
gated, GELU(x w) * x v, with H=32768; RMSNorm before and after each branch; rotary positions; attention scores capped at
30 by a tanh; no biases; one embedding of 131,072 symbols for input and output, whose scores are multiplied by 3^-0.5;
context 8192. How it was trained is not public: optimizer, batch and losses are GShard's here. A token's weights are the
softmax at its two experts, not rescaled.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.lm.lm_config import LmConfig


@registry.register
class Grok1(LmConfig):
  """Grok-1: 316B weights, 83.8B used by a token. Published: 314B.

  Result:  not yet run; compiled for TPU v5p:4x4x8, 92.3 GiB a chip (docs/language_models.md)
  """

  vocab: str = 'pieces'
  vocab_size: int = 131_072
  documents: str = 'paragraph'
  packing: bool = True
  window: int = 8192
  batch_tokens: int = 64 * 8192
  num_groups: int = 64
  num_layers: int = 64
  model_dim: int = 6144
  ff_dim: int = 32_768
  num_heads: int = 48
  num_kv_heads: int = 8
  head_dim: int = 128
  num_experts: int = 8
  moe_every: int = 1
  gate: str = 'top_k_unnormalised'
  expert: str = 'geglu'
  post_norm: bool = True
  logit_cap: float = 30.0
  logit_scale: float = 3**-0.5
  norm_epsilon: float = 1e-5
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  label_smoothing: float = 0.0
  activation_dtype: str = 'bfloat16'
  dispatch: str = 'einsum'
  scan_layers: bool = True
  remat: str = 'block'


registry.tiny(
  Grok1,
  '188k weights, 77k used by a token',
  vocab_size=300,
  window=32,
  batch_tokens=256,
  num_groups=4,
  num_layers=2,
  model_dim=48,
  ff_dim=64,
  num_heads=12,
  num_kv_heads=4,
  head_dim=8,
  max_steps=20,
)
