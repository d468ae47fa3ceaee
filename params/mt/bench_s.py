"""bench-S: one fixed size for comparing speed, with other systems and between commits (python tools/bench.py).

M=256, H=1024, 4 heads of 64, 4 + 4 layers, vocabularies of 8000, float32, no dropout; a batch is 32 pairs of 64 tokens
a side. The models are not meant to be trained on text.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class Dense(MtConfig):
  """No experts: 11.5M weights, 9.42M used by a token.

  Run:     python tools/bench.py --model=mt.bench_s.Dense --what=train,decode
  Result:  docs/speed.md
  """

  source_vocab_size: int = 8000
  target_vocab_size: int = 8000
  batch_tokens: int = 2048
  num_groups: int = 2
  max_length: int = 64
  model_dim: int = 256
  ff_dim: int = 1024
  head_dim: int = 64
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  decode_ratio: float = 1.0
  decode_extra: int = 0


@registry.register
class Moe16(Dense):
  """16 experts in every other layer: 42.9M weights, 11.5M used by a token.

  Run:     python tools/bench.py --model=mt.bench_s.Moe16 --what=train,decode
  Result:  docs/speed.md
  """

  num_experts: int = 16


@registry.register
class Moe128(Dense):
  """128 experts in every other layer: 278M weights, 11.6M used by a token.

  Run:     python tools/bench.py --model=mt.bench_s.Moe128 --what=train,decode
  Result:  docs/speed.md
  """

  num_experts: int = 128
  num_groups: int = 1


@registry.register
class Moe512(Dense):
  """512 experts in every other layer: 1.08B weights, 12M used by a token.

  Run:     python tools/bench.py --model=mt.bench_s.Moe512 --what=train,decode
  Result:  docs/speed.md
  """

  num_experts: int = 512
  num_groups: int = 1


@registry.register
class Tiny(Moe16):
  """Moe16 at the size of a test: 192k weights, 64.5k used by a token.

  Run:     python tools/bench.py --model=mt.bench_s.Tiny --calls=1
  """

  source_vocab_size: int = 400
  target_vocab_size: int = 400
  batch_tokens: int = 128
  max_length: int = 16
  num_groups: int = 4
  model_dim: int = 32
  ff_dim: int = 64
  head_dim: int = 8
  encoder_layers: int = 2
  decoder_layers: int = 2
