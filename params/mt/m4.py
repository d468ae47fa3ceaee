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
not public: give --data_dir, with a folder <language>-en for each pair. BLEU, cores and days in the docstrings are the
paper's; no result here has been reproduced.
"""

import dataclasses

from lingvo_moe.config import registry
from lingvo_moe.tasks.mt.mt_config import MtConfig


@dataclasses.dataclass(frozen=True)
class _M4(MtConfig):
  """Values of all models with 2048 experts (appendix A.2)."""

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
class _M4SmallBatch(_M4):
  """Values of all models with 512 and 128 experts."""

  batch_tokens: int = 2**20
  max_steps: int = 1_000_000


@registry.register
class MoE2048E36L(_M4):
  """MoE(2048E, 36L), the paper's best: 619B weights, 1.43B used by a token. Table 1 says 600B.

  Result:  not yet run (the paper: BLEU 44.3, mean of 100 languages; 2048 TPU v3 cores, 4.0 days)
  """

  num_experts: int = 2048
  encoder_layers: int = 18
  decoder_layers: int = 18


@registry.register
class MoE2048E12L(_M4):
  """MoE(2048E, 12L): 207B weights, 499M used by a token. Table 1 says 200B.

  Result:  not yet run (the paper: BLEU 41.3; 2048 TPU v3 cores, 1.4 days)
  """

  num_experts: int = 2048
  encoder_layers: int = 6
  decoder_layers: int = 6


@registry.register
class MoE512E36L(_M4SmallBatch):
  """MoE(512E, 36L): 155B weights, 1.4B used by a token. Table 1 says 150B.

  Result:  not yet run (the paper: BLEU 43.7; 512 TPU v3 cores, 11.0 days)
  """

  num_experts: int = 512
  encoder_layers: int = 18
  decoder_layers: int = 18


@registry.register
class MoE512E12L(_M4SmallBatch):
  """MoE(512E, 12L): 51.9B weights, 489M used by a token. Table 1 says 50B.

  Result:  not yet run (the paper: BLEU 40.0; 512 TPU v3 cores, 3.5 days)
  """

  num_experts: int = 512
  encoder_layers: int = 6
  decoder_layers: int = 6


@registry.register
class MoE128E36L(_M4SmallBatch):
  """MoE(128E, 36L): 39.5B weights, 1.39B used by a token. Table 1 says 37B.

  Result:  not yet run (the paper: BLEU 39.0; 128 TPU v3 cores, 17.3 days)
  """

  num_experts: int = 128
  encoder_layers: int = 18
  decoder_layers: int = 18


@registry.register
class MoE128E12L(_M4SmallBatch):
  """MoE(128E, 12L): 13.2B weights, 487M used by a token. Table 1 says 12.5B.

  Result:  not yet run (the paper: BLEU 36.7; 128 TPU v3 cores, 5.4 days)
  """

  num_experts: int = 128
  encoder_layers: int = 6
  decoder_layers: int = 6


@registry.register
class MoE2048E24L(_M4):
  """MoE(2048E, 24L), whose memory Figure 7 shows: 413B weights, 964M used by a token.

  Result:  not yet run (the paper gives none)
  """

  num_experts: int = 2048
  encoder_layers: int = 12
  decoder_layers: int = 12


@registry.register
class MoE2048E60L(_M4):
  """MoE(2048E, 60L), bfloat16 activations: 1.03T weights, 2.36B used by a token. Table 1 says 1T.

  Result:  not yet run (the paper gives none: it met 'trainability issues with numerical stability')
  """

  num_experts: int = 2048
  encoder_layers: int = 30
  decoder_layers: int = 30
  activation_dtype: str = 'bfloat16'


@registry.register
class T96L(_M4):
  """T(96L), the dense baseline of 48 + 48 layers: 2.31B weights, 2.25B used by a token. The paper says 2.3B.

  Heads are of 64: that is what makes 2.3B (heads of 128 would make 2.9B).

  Result:  not yet run (the paper: BLEU 36.9; 2048 TPU v3 cores, 42 days)
  """

  head_dim: int = 64
  encoder_layers: int = 48
  decoder_layers: int = 48
  max_steps: int = 300_000


@registry.register
class T128L(_M4):
  """T(128L), the larger dense model of footnote 11: 64 + 64 layers, 6.01B weights, 5.94B used by a token.

  Sizes are those of GPipe's model of 6B weights, T(64, 16384, 32) (arXiv 1811.06965), with heads of 64.

  Result:  not yet run
  """

  ff_dim: int = 16_384
  num_heads: int = 32
  head_dim: int = 64
  encoder_layers: int = 64
  decoder_layers: int = 64
  max_steps: int = 300_000


@registry.register
class BilingualBig(_M4):
  """One rich language into English, in the Transformer-Big layout: 343M weights, 310M used by a token.

  The paper's baseline for a language is a model of its own, its batch size and dropout tuned to its data; sizes are
  not given. These are the Transformer Big of the authors' earlier work on this corpus, T(6, 8192, 16) of GPipe
  (arXiv 1811.06965). Choose the language and tune with --gin_bindings='BilingualBig.pairs = "fra-en"',
  --gin_bindings='BilingualBig.residual_dropout = 0.2' and the like.

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
class BilingualBase(BilingualBig):
  """One poor language into English, in the Transformer-Base layout: 76.9M weights, 60.5M used by a token.

  M=512, H=2048, 8 heads of 64, as Vaswani et al. (2017) have it; see BilingualBig.

  Result:  not yet run (the paper: BLEU 30.8, mean of 100 models)
  """

  pairs: str = 'isl-en'
  batch_tokens: int = 2**15
  model_dim: int = 512
  ff_dim: int = 2048
  num_heads: int = 8
  max_steps: int = 100_000


def _tiny(giant: type, counts: str, layers: int, **sizes: int) -> type:
  """8 groups, 4 heads, experts in multiples of 8, so that meshes of 2 and 4 divide them; `layers` a stack."""
  return registry.tiny(
    giant,
    counts,
    source_vocab_size=8000,
    target_vocab_size=4000,
    max_length=64,
    batch_tokens=2048,
    num_groups=8,
    model_dim=32,
    ff_dim=64,
    num_heads=4,
    head_dim=8,
    max_steps=1000,
    encoder_layers=layers,
    decoder_layers=layers,
    **sizes,
  )


MoE2048E36LTiny = _tiny(MoE2048E36L, '981k weights, 233k used by a token', layers=4, num_experts=32)
MoE2048E12LTiny = _tiny(MoE2048E12L, '682k weights, 181k used by a token', layers=2, num_experts=32)
MoE512E36LTiny = _tiny(MoE512E36L, '717k weights, 231k used by a token', layers=4, num_experts=16)
MoE512E12LTiny = _tiny(MoE512E12L, '550k weights, 180k used by a token', layers=2, num_experts=16)
MoE128E36LTiny = _tiny(MoE128E36L, '585k weights, 230k used by a token', layers=4, num_experts=8)
MoE128E12LTiny = _tiny(MoE128E12L, '484k weights, 179k used by a token', layers=2, num_experts=8)
MoE2048E24LTiny = _tiny(MoE2048E24L, '981k weights, 233k used by a token', layers=4, num_experts=32)
MoE2048E60LTiny = _tiny(MoE2048E60L, '981k weights, 233k used by a token', layers=4, num_experts=32)
T96LTiny = _tiny(T96L, '469k weights, 213k used by a token', layers=4)
T128LTiny = _tiny(T128L, '469k weights, 213k used by a token', layers=4)
BilingualBigTiny = _tiny(BilingualBig, '427k weights, 171k used by a token', layers=2)
BilingualBaseTiny = _tiny(BilingualBase, '427k weights, 171k used by a token', layers=2)
