"""M4: 100 languages into English, the models of GShard (arXiv 2006.16668): Table 1, Figure 7 and the baselines.

What the paper says (section 4, appendix A.2): M=1024, H=8192, 16 heads of 128; dropout 0.1 on input, residual and
attention; Adafactor with learning rate 1.0 and square-root decay after 10k steps; 64k source pieces, 32k English ones;
experts in every other layer; 4M source tokens a batch with 2048 experts and for T(96L), 1M with 512 and 128; training
until 10^12 tokens were seen. '36L' is 18 encoder layers and 18 decoder layers.

What it leaves open, and what is taken here: label smoothing 0.1 (as is usual for Transformers); sampling of languages
at temperature 5 (as in Arivazhagan et al., arXiv 1907.05019, on the same corpus); rows of 256 positions, packed, so
that every batch has one shape. 4M and 1M are taken as 2^22 and 2^20 positions a side.

Groups: 2048 in every giant of this file but the bilingual ones, so that any mesh of 2^k devices up to 2048 divides
them. A group then has 2048 positions where a batch has 4M, and 512 where it has 1M: C is 2 slots an expert and group
with 2048 or 512 experts, 8 with 128. (The paper sets G in proportion to its devices. With 128 experts and 128 groups of
8192, applying the masks of Algorithm 2 would cost as much as the experts they feed.)

Each has a sibling, <name>Tiny, of the same graph, fewer layers and tiny sizes, that runs on anything. The corpus is
not public: give --data_dir, with a folder <language>-en for each pair. No result here has been reproduced: 'not yet
run' means what it says.
"""

from __future__ import annotations

import dataclasses

import gin

from lingvo_moe.core import registry
from lingvo_moe.tasks.mt.config import MtConfig


@dataclasses.dataclass(frozen=True)
class _M4(MtConfig):
  """What all of them share (appendix A.2)."""

  pairs: str = '*-en'
  source_vocab_size: int = 64_000
  target_vocab_size: int = 32_000
  temperature: float = 5.0
  max_length: int = 256
  packing: bool = True
  batch_tokens: int = 4 * 2**20
  num_groups: int = 2048
  model_dim: int = 1024
  ff_dim: int = 8192
  num_heads: int = 16
  head_dim: int = 128
  dispatch: str = 'einsum'
  scan_layers: bool = True
  remat: str = 'block'
  max_steps: int = 250_000


@dataclasses.dataclass(frozen=True)
class _Tiny:
  """Sizes of the siblings: 8 groups, 4 heads, experts in multiples of 8, so that meshes of 2 and 4 divide them."""

  source_vocab_size: int = 8000
  target_vocab_size: int = 4000
  max_length: int = 64
  batch_tokens: int = 2048
  num_groups: int = 8
  model_dim: int = 32
  ff_dim: int = 64
  num_heads: int = 4
  head_dim: int = 8
  max_steps: int = 1000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E36L(_M4):
  """MoE(2048E, 36L), the paper's best: 619B weights, 1.43B used by a token. Table 1 says 600B.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E36L --logdir=DIR --data_dir=CORPUS
           (the paper: 2048 TPU v3 cores, 4.0 days)
  Result:  not yet run (the paper: BLEU 44.3, mean of 100 languages)
  """

  num_experts: int = 2048
  encoder_layers: int = 18
  decoder_layers: int = 18


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E12L(_M4):
  """MoE(2048E, 12L): 207B weights, 499M used by a token. Table 1 says 200B.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E12L --logdir=DIR --data_dir=CORPUS
           (the paper: 2048 TPU v3 cores, 1.4 days)
  Result:  not yet run (the paper: BLEU 41.3)
  """

  num_experts: int = 2048
  encoder_layers: int = 6
  decoder_layers: int = 6


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE512E36L(_M4):
  """MoE(512E, 36L): 155B weights, 1.4B used by a token. Table 1 says 150B.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE512E36L --logdir=DIR --data_dir=CORPUS
           (the paper: 512 TPU v3 cores, 11.0 days)
  Result:  not yet run (the paper: BLEU 43.7)
  """

  batch_tokens: int = 2**20
  num_experts: int = 512
  encoder_layers: int = 18
  decoder_layers: int = 18
  max_steps: int = 1_000_000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE512E12L(_M4):
  """MoE(512E, 12L): 51.9B weights, 489M used by a token. Table 1 says 50B.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE512E12L --logdir=DIR --data_dir=CORPUS
           (the paper: 512 TPU v3 cores, 3.5 days)
  Result:  not yet run (the paper: BLEU 40.0)
  """

  batch_tokens: int = 2**20
  num_experts: int = 512
  encoder_layers: int = 6
  decoder_layers: int = 6
  max_steps: int = 1_000_000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE128E36L(_M4):
  """MoE(128E, 36L): 39.5B weights, 1.39B used by a token. Table 1 says 37B.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE128E36L --logdir=DIR --data_dir=CORPUS
           (the paper: 128 TPU v3 cores, 17.3 days)
  Result:  not yet run (the paper: BLEU 39.0)
  """

  batch_tokens: int = 2**20
  num_experts: int = 128
  encoder_layers: int = 18
  decoder_layers: int = 18
  max_steps: int = 1_000_000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE128E12L(_M4):
  """MoE(128E, 12L): 13.2B weights, 487M used by a token. Table 1 says 12.5B.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE128E12L --logdir=DIR --data_dir=CORPUS
           (the paper: 128 TPU v3 cores, 5.4 days)
  Result:  not yet run (the paper: BLEU 36.7)
  """

  batch_tokens: int = 2**20
  num_experts: int = 128
  encoder_layers: int = 6
  decoder_layers: int = 6
  max_steps: int = 1_000_000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E24L(_M4):
  """MoE(2048E, 24L), whose memory Figure 7 shows: 413B weights, 964M used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E24L --logdir=DIR --data_dir=CORPUS
  Result:  not yet run (the paper gives none)
  """

  num_experts: int = 2048
  encoder_layers: int = 12
  decoder_layers: int = 12


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E60L(_M4):
  """MoE(2048E, 60L), bfloat16 activations: 1.03T weights, 2.36B used by a token. Table 1 says 1T.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E60L --logdir=DIR --data_dir=CORPUS
  Result:  not yet run (the paper gives none: it met 'trainability issues with numerical stability')
  """

  num_experts: int = 2048
  encoder_layers: int = 30
  decoder_layers: int = 30
  activation_dtype: str = 'bfloat16'


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class T96L(_M4):
  """T(96L), the dense baseline of 48 + 48 layers: 2.31B weights, 2.25B used by a token. The paper says 2.3B.

  Heads are of 64: that is what makes 2.3B (heads of 128 would make 2.9B).

  Run:     python -m lingvo_moe.trainer --model=mt.m4.T96L --logdir=DIR --data_dir=CORPUS
           (the paper: 2048 TPU v3 cores, 42 days)
  Result:  not yet run (the paper: BLEU 36.9)
  """

  head_dim: int = 64
  encoder_layers: int = 48
  decoder_layers: int = 48
  max_steps: int = 300_000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class BilingualBig(_M4):
  """One rich language into English, in the Transformer-Big layout: 343M weights, 310M used by a token.

  The paper's baseline for a language is a model of its own, its batch size and dropout tuned to its data; sizes are
  not given. These are the Transformer Big of the authors' earlier work on this corpus, T(6, 8192, 16) of GPipe
  (arXiv 1811.06965). Tune with --gin_bindings='BilingualBig.residual_dropout = 0.2' and the like.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.BilingualBig --logdir=DIR --data_dir=CORPUS
           --gin_bindings='BilingualBig.pairs = "fra-en"'
  Result:  not yet run (the paper: BLEU 30.8, mean of 100 models)
  """

  pairs: str = 'deu-en'
  source_vocab_size: int = 32_000
  temperature: float = 1.0
  batch_tokens: int = 2**18
  num_groups: int = 128
  head_dim: int = 64
  encoder_layers: int = 6
  decoder_layers: int = 6
  max_steps: int = 300_000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class BilingualBase(_M4):
  """One poor language into English, in the Transformer-Base layout: 76.9M weights, 60.5M used by a token.

  M=512, H=2048, 8 heads of 64, as Vaswani et al. (2017) have it; see BilingualBig.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.BilingualBase --logdir=DIR --data_dir=CORPUS
           --gin_bindings='BilingualBase.pairs = "isl-en"'
  Result:  not yet run (the paper: BLEU 30.8, mean of 100 models)
  """

  pairs: str = 'isl-en'
  source_vocab_size: int = 32_000
  temperature: float = 1.0
  batch_tokens: int = 2**15
  num_groups: int = 128
  model_dim: int = 512
  ff_dim: int = 2048
  num_heads: int = 8
  head_dim: int = 64
  encoder_layers: int = 6
  decoder_layers: int = 6
  max_steps: int = 100_000


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E36LTiny(_Tiny, _M4):
  """MoE2048E36L at a size that runs here: 981k weights, 233k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E36LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 32
  encoder_layers: int = 4
  decoder_layers: int = 4


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E12LTiny(_Tiny, _M4):
  """MoE2048E12L at a size that runs here: 682k weights, 181k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E12LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 32
  encoder_layers: int = 2
  decoder_layers: int = 2


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE512E36LTiny(_Tiny, _M4):
  """MoE512E36L at a size that runs here: 717k weights, 231k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE512E36LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 16
  encoder_layers: int = 4
  decoder_layers: int = 4


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE512E12LTiny(_Tiny, _M4):
  """MoE512E12L at a size that runs here: 550k weights, 180k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE512E12LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 16
  encoder_layers: int = 2
  decoder_layers: int = 2


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE128E36LTiny(_Tiny, _M4):
  """MoE128E36L at a size that runs here: 585k weights, 230k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE128E36LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 8
  encoder_layers: int = 4
  decoder_layers: int = 4


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE128E12LTiny(_Tiny, _M4):
  """MoE128E12L at a size that runs here: 484k weights, 179k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE128E12LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 8
  encoder_layers: int = 2
  decoder_layers: int = 2


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E24LTiny(_Tiny, _M4):
  """MoE2048E24L at a size that runs here: 981k weights, 233k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E24LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 32
  encoder_layers: int = 4
  decoder_layers: int = 4


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class MoE2048E60LTiny(_Tiny, _M4):
  """MoE2048E60L at a size that runs here: 981k weights, 233k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.MoE2048E60LTiny --logdir=DIR --data_dir=CORPUS
  """

  num_experts: int = 32
  encoder_layers: int = 4
  decoder_layers: int = 4
  activation_dtype: str = 'bfloat16'


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class T96LTiny(_Tiny, _M4):
  """T96L at a size that runs here: 469k weights, 213k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.T96LTiny --logdir=DIR --data_dir=CORPUS
  """

  encoder_layers: int = 4
  decoder_layers: int = 4


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class BilingualBigTiny(_Tiny, _M4):
  """BilingualBig at a size that runs here: 427k weights, 171k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.BilingualBigTiny --logdir=DIR --data_dir=CORPUS
  """

  pairs: str = 'deu-en'
  temperature: float = 1.0
  encoder_layers: int = 2
  decoder_layers: int = 2


@registry.register
@gin.configurable
@dataclasses.dataclass(frozen=True)
class BilingualBaseTiny(_Tiny, _M4):
  """BilingualBase at a size that runs here: 427k weights, 171k used by a token.

  Run:     python -m lingvo_moe.trainer --model=mt.m4.BilingualBaseTiny --logdir=DIR --data_dir=CORPUS
  """

  pairs: str = 'isl-en'
  temperature: float = 1.0
  encoder_layers: int = 2
  decoder_layers: int = 2
