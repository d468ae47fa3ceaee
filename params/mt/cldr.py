"""The default corpus: 125 languages into English, composed out of the CLDR data in Babel.

lingvo-moe cldr writes it; tools/quickstart does it all.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class Dense(MtConfig):
  """MoE8E's dense twin: 1.72M weights, 948k used by a token.

  Its ff_dim is 1.5 times an expert's, so that a token costs as many FLOPs: two experts in every other layer.

  Run:     tools/quickstart --model=mt.cldr.Dense
  Result:  mean BLEU 90.4 over 16 languages on the test set (copying the source 7.7), 1200 steps, two cores of
           an AMD EPYC; BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0
  """

  pairs: str = '*-en'
  source_vocab_size: int = 6000
  target_vocab_size: int = 1200
  batch_tokens: int = 3072
  max_length: int = 96
  temperature: float = 2.0
  num_groups: int = 8
  model_dim: int = 128
  ff_dim: int = 384
  num_heads: int = 4
  head_dim: int = 32
  encoder_layers: int = 2
  decoder_layers: int = 2
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  optimizer: str = 'adam'
  schedule: str = 'warmup_inverse_sqrt'
  learning_rate: float = 4e-3
  warmup_steps: int = 300
  clip_norm: float = 1.0
  max_steps: int = 1200
  eval_every: int = 300
  eval_sentences: int = 50


@registry.register
class MoE8E(Dense):
  """The quickstart's model, with 8 experts in every other layer: 2.5M weights, 948k used by a token.

  Start here: the corpus is made in seconds, and a laptop suffices.

  Run:     tools/quickstart
  Result:  mean BLEU 90.7 over 16 languages on the test set (copying the source 7.7), 1200 steps, 6.5 minutes
           on two cores; BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0
  """

  num_experts: int = 8
  ff_dim: int = 256


@registry.register
class Tiny(MoE8E):
  """MoE8E at the size of a test, 4 groups, 4 heads, 8 experts: 209k weights, 64k used by a token."""

  source_vocab_size: int = 3000
  target_vocab_size: int = 400
  batch_tokens: int = 512
  max_length: int = 64
  num_groups: int = 4
  model_dim: int = 32
  ff_dim: int = 64
  head_dim: int = 8
  max_steps: int = 20
  eval_every: int = 10
