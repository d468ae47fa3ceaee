"""m4mini: 100 languages into English at a size for one small GPU or a patient CPU, M4 in little.

The corpus lies in <data_dir>/<iso639-3>-en/{train,dev,test}.{<iso639-3>,en}[.gz]. Sizes of the languages follow a power
law (29,000 pairs to a few hundred in the set these values were chosen for), hence the temperature. Many scripts share
the source vocabulary: 32k pieces cover 99.95 % of all characters, the others are spelt in bytes.
"""

from __future__ import annotations

import dataclasses

import gin

from lingvo_moe import registry
from lingvo_moe.tasks.mt.config import MtConfig


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class Dense(MtConfig):
  """The experts' dense twin: 19.7M weights, 11.5M used by a token.

  Two experts of H=1024 a token in every other layer cost what 1.5 x H costs in every layer: so ff_dim is 1536, and a
  token costs the same FLOPs in all models of this file but Tiny.

  Run:     python -m lingvo_moe.trainer --model=mt.m4mini.Dense --logdir=DIR --data_dir=M4MINI
  Result:  not yet run
  """

  pairs: str = '*-en'
  source_vocab_size: int = 32_000
  target_vocab_size: int = 8000
  temperature: float = 5.0
  batch_tokens: int = 8192
  max_length: int = 192
  num_groups: int = 8
  model_dim: int = 256
  ff_dim: int = 1536
  num_heads: int = 4
  head_dim: int = 64
  encoder_layers: int = 4
  decoder_layers: int = 4
  max_steps: int = 100_000
  eval_sentences: int = 50
  patience: int = 10


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE8E(Dense):
  """8 experts in every other layer: 32.3M weights, 11.5M used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4mini.MoE8E --logdir=DIR --data_dir=M4MINI
  Result:  not yet run
  """

  ff_dim: int = 1024
  num_experts: int = 8


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE32E(Dense):
  """32 experts in every other layer: 82.7M weights, 11.5M used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4mini.MoE32E --logdir=DIR --data_dir=M4MINI
  Result:  not yet run
  """

  ff_dim: int = 1024
  num_experts: int = 32


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE64E(Dense):
  """64 experts in every other layer: 150M weights, 11.6M used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4mini.MoE64E --logdir=DIR --data_dir=M4MINI
  Result:  not yet run
  """

  ff_dim: int = 1024
  num_experts: int = 64


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class Tiny(Dense):
  """A test-size MoE on the same text, 8 experts, 4 heads, 4 groups: 484k weights, 179k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4mini.Tiny --logdir=DIR --data_dir=M4MINI
  """

  source_vocab_size: int = 8000
  target_vocab_size: int = 4000
  batch_tokens: int = 1024
  num_groups: int = 4
  model_dim: int = 32
  ff_dim: int = 64
  head_dim: int = 8
  encoder_layers: int = 2
  decoder_layers: int = 2
  num_experts: int = 8
  max_steps: int = 1000
