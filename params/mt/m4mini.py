"""m4mini: 100 languages into English and out of it, GShard's setting in a size that one core of a CPU trains.

The corpus lies in <data_dir>/<iso639-3>-en/{train,dev,test}.{<iso639-3>,en}[.gz]. Sizes of the languages follow a power
law (29,000 pairs to a few hundred in the set these values were chosen for), hence the temperature. Many scripts share
a vocabulary: characters that have no piece are spelt in bytes.

Size S has 4 + 4 layers, M=128 and experts of H=512 in every other layer. Two experts a token cost what 1.5 x H costs in
every layer, so their dense twin has H=768, and a token costs the same FLOPs in both. The schedule has no horizon, so
that any two runs compare at equal steps. One group: loads are balanced over the whole batch.

Size XS halves M, H and the batch, for runs of one to four hours of a core, an epoch or two. Out of English it has no
dropout, as every target is another one; into English the same verse is the target of many pairs.
"""

from __future__ import annotations

from lingvo_moe.config import registry
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class Dense(MtConfig):
  """Into English, without experts: 6.98M weights, 2.89M used by a token.

  Result:  not yet run
  """

  pairs: str = '*-en'
  source_vocab_size: int = 32_000
  target_vocab_size: int = 4000
  temperature: float = 2.0
  batch_tokens: int = 8192
  max_length: int = 128
  model_dim: int = 128
  ff_dim: int = 768
  num_heads: int = 4
  head_dim: int = 32
  encoder_layers: int = 4
  decoder_layers: int = 4
  optimizer: str = 'adam'
  schedule: str = 'warmup_inverse_sqrt'
  learning_rate: float = 4e-3
  warmup_steps: int = 1500
  clip_norm: float = 1.0
  max_steps: int = 6920  # two epochs
  eval_every: int = 173
  keep_every: int = 865
  eval_sentences: int = 20


@registry.register
class MoE8E(Dense):
  """Into English, 8 experts in every other layer: 10.1M weights, 2.89M used by a token.

  Result:  not yet run
  """

  ff_dim: int = 512
  num_experts: int = 8
  capacity_factor: float | None = 4.0


@registry.register
class MoE32E(Dense):
  """Into English, 32 experts in every other layer: 22.7M weights, 2.9M used by a token.

  Result:  not yet run
  """

  ff_dim: int = 512
  num_experts: int = 32
  capacity_factor: float | None = 4.0


@registry.register
class MoE128E(Dense):
  """Into English, 128 experts in every other layer: 73.1M weights, 2.95M used by a token.

  Result:  not yet run
  """

  ff_dim: int = 512
  num_experts: int = 128
  capacity_factor: float | None = 4.0


@registry.register
class XsDense(Dense):
  """Into English, size XS, without experts: 2.9M weights, 855k used by a token.

  Result:  dev loss 3.432 after 10,380 steps; mean BLEU 5.4 on all lines of test. docs/quality.md.
  """

  batch_tokens: int = 4096
  model_dim: int = 64
  ff_dim: int = 384
  head_dim: int = 16
  warmup_steps: int = 500
  max_steps: int = 10_380  # 1.48 epochs
  eval_every: int = 346
  keep_every: int = 346


@registry.register
class XsMoE32E(XsDense):
  """Into English, size XS, 32 experts in every other layer of the encoder: 4.81M weights, 791k used by a token.

  With experts in the decoder too, it memorises the verses that are targets of many pairs, and translates worse.

  Result:  dev loss 3.406 after 10,380 steps; mean BLEU 5.8 on all lines of test. docs/quality.md.
  """

  ff_dim: int = 256
  num_experts: int = 32
  capacity_factor: float | None = 4.0
  experts_in: str = 'encoder'


@registry.register
class FromEnglishDense(Dense):
  """Out of English, without experts: 4.95M weights, 4.42M used by a token.

  Result:  dev loss 4.974 after 975 steps, a quarter of an epoch; not run to its end. docs/quality.md.
  """

  pairs: str = 'en-*'
  source_vocab_size: int = 4100
  target_vocab_size: int = 16_000
  max_steps: int = 7800  # two epochs
  eval_every: int = 195
  keep_every: int = 975
  eval_sentences: int = 10


@registry.register
class FromEnglishMoE8E(FromEnglishDense):
  """Out of English, 8 experts in every other layer: 8.09M weights, 4.42M used by a token.

  Result:  not yet run
  """

  ff_dim: int = 512
  num_experts: int = 8
  capacity_factor: float | None = 4.0


@registry.register
class FromEnglishMoE32E(FromEnglishDense):
  """Out of English, 32 experts in every other layer: 20.7M weights, 4.44M used by a token.

  Result:  dev loss 4.816 after 975 steps, a quarter of an epoch; not run to its end. docs/quality.md.
  """

  ff_dim: int = 512
  num_experts: int = 32
  capacity_factor: float | None = 4.0


@registry.register
class FromEnglishMoE128E(FromEnglishDense):
  """Out of English, 128 experts in every other layer: 71.1M weights, 4.49M used by a token.

  Result:  not yet run
  """

  ff_dim: int = 512
  num_experts: int = 128
  capacity_factor: float | None = 4.0


@registry.register
class FromEnglishMoE32E16L(FromEnglishMoE32E):
  """Out of English, 32 experts, 8 + 8 layers: 38.8M weights, 6.82M used by a token.

  Result:  not yet run
  """

  encoder_layers: int = 8
  decoder_layers: int = 8
  max_steps: int = 3900  # one epoch


@registry.register
class FromEnglishXsDense(FromEnglishDense):
  """Out of English, size XS, without experts: 1.88M weights, 1.62M used by a token.

  Result:  dev loss 4.288 after 7995 steps and 4.140 after 15,600; mean chrF2 14.2 and 15.6. docs/quality.md.
  """

  batch_tokens: int = 4096
  model_dim: int = 64
  ff_dim: int = 384
  head_dim: int = 16
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  warmup_steps: int = 500
  max_steps: int = 15_854  # two epochs
  keep_every: int = 390


@registry.register
class FromEnglishXsMoE8E(FromEnglishXsDense):
  """Out of English, size XS, 8 experts in every other layer: 2.67M weights, 1.62M used by a token.

  Result:  dev loss 4.174 after 7995 steps; mean chrF2 14.6. docs/quality.md.
  """

  ff_dim: int = 256
  num_experts: int = 8
  capacity_factor: float | None = 4.0


@registry.register
class FromEnglishXsMoE32E(FromEnglishXsDense):
  """Out of English, size XS, 32 experts in every other layer: 5.82M weights, 1.63M used by a token.

  Result:  dev loss 4.001 after 7995 steps and 3.811 after 15,600; mean chrF2 16.0 and 18.2. docs/quality.md.
  """

  ff_dim: int = 256
  num_experts: int = 32
  capacity_factor: float | None = 4.0


@registry.register
class FromEnglishXsByLanguage(FromEnglishXsMoE32E):
  """Out of English, size XS, 32 experts of which a language uses two: 5.81M weights, 1.62M used by a token.

  Counts are without the gate's rows of all but one language, 128 weights each.

  Result:  dev loss 4.511 after 1950 packed steps (by token: 4.555); not run to its end. docs/quality.md.
  """

  gate: str = 'by_target'
  capacity_factor: float | None = None


@registry.register
class FromEnglishXsMoE128E(FromEnglishXsDense):
  """Out of English, size XS, 128 experts in every other layer: 18.4M weights, 1.65M used by a token.

  Result:  dev loss 3.889 after 7995 steps; mean chrF2 16.7. docs/quality.md.
  """

  ff_dim: int = 256
  num_experts: int = 128
  capacity_factor: float | None = 4.0


@registry.register
class FromEnglishXsMoE32E16L(FromEnglishXsMoE32E):
  """Out of English, size XS, 32 experts, 8 + 8 layers: 10.4M weights, 2.23M used by a token.

  Result:  dev loss 3.923 after 7995 steps; mean chrF2 16.4. docs/quality.md.
  """

  encoder_layers: int = 8
  decoder_layers: int = 8
  max_steps: int = 7995  # an epoch


@registry.register
class Tiny(Dense):
  """A test-size MoE on the same text, 8 experts, 4 heads, 4 groups: 484k weights, 179k used by a token."""

  source_vocab_size: int = 8000
  batch_tokens: int = 1024
  num_groups: int = 4
  model_dim: int = 32
  ff_dim: int = 64
  head_dim: int = 8
  encoder_layers: int = 2
  decoder_layers: int = 2
  num_experts: int = 8
  capacity_factor: float | None = 2.0
  max_steps: int = 1000
  eval_every: int = 500
