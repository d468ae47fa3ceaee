"""Shakespeare's plays by character, at the setting for CPUs of nanoGPT (github.com/karpathy/nanoGPT).

Its README: 4 layers, 4 heads, M=128, windows of 64, 2000 steps of 12 windows, no dropout, AdamW with a learning rate
of 1e-3, 100 steps of warmup and a cosine decay; validation loss 1.88 nats a character. Here positions are rotary, norms
are RMSNorms, and the rate decays as 1 / sqrt(t).

The text is tiny Shakespeare (data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn), its first 90% as
train.txt and the last 10% as dev.txt.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.lm.lm_config import LmConfig


@registry.register
class Dense(LmConfig):
  """nanoGPT's model for CPUs: 796k weights, 796k used by a token.

  Result:  dev loss 1.70 nats a character after 2000 steps (nanoGPT's README: 1.88); 1.65 and 1.66 (two seeds) with
           optimizer=adamw, weight_decay=0.1, adam_beta2=0.99, schedule=cosine, final_rate=0.1
  """

  vocab: str = 'char'
  vocab_size: int = 69
  window: int = 64
  batch_tokens: int = 768
  eval_batch_tokens: int = 8192
  num_groups: int = 4
  num_layers: int = 4
  model_dim: int = 128
  ff_dim: int = 512
  num_heads: int = 4
  head_dim: int = 32
  activation: str = 'gelu'
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  label_smoothing: float = 0.0
  optimizer: str = 'adam'
  schedule: str = 'warmup_inverse_sqrt'
  learning_rate: float = 3e-3
  warmup_steps: int = 100
  clip_norm: float = 1.0
  max_steps: int = 2000
  log_every: int = 50
  eval_every: int = 500


@registry.register
class MoE8E(Dense):
  """Dense with 8 experts of half its H in every layer, two per token: 2.37M weights, 801k used by a token.

  Start here: minutes on a laptop.

  Result:  dev loss 1.67 nats a character after 2000 steps (Dense: 1.70)
  """

  num_experts: int = 8
  expert: str = 'gelu'
  moe_every: int = 1
  ff_dim: int = 256


@registry.register
class Competing(Dense):
  """Dense with 4 competing experts as its output softmax (Jacobs et al., 1991): 871k weights, 863k used by a token.

  Result:  dev loss 1.69 nats a character after 2000 steps (Dense: 1.70)
  """

  output_experts: int = 4


@registry.register
class Tiny(MoE8E):
  """MoE8E at the size of a test: bytes, 4 groups, 8 experts, 8 heads, 4 keys: 80.7k weights, 31.5k used by a token."""

  vocab: str = 'byte'
  vocab_size: int = 260
  window: int = 16
  batch_tokens: int = 128
  eval_batch_tokens: int = 0
  num_layers: int = 2
  model_dim: int = 32
  ff_dim: int = 64
  num_heads: int = 8
  num_kv_heads: int = 4
  head_dim: int = 4
  max_new_tokens: int = 16
  max_steps: int = 20
  log_every: int = 1
  eval_every: int = 10
