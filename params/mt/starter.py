"""Starter: one model for any corpus that lingvo-moe prepare writes, trained without a --set.

Every pair folder is trained on. Steps, evaluations, warmup and the size of the vocabulary follow from the corpus when
the run begins (tasks/run_length.py, tasks/mt/run_vocabs.py).
"""

from __future__ import annotations

from lingvo_moe.config import registry
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class Dense(MtConfig):
  """MoE8E's dense twin, with as many FLOPs a token: 2.61M weights, 2.61M used by a token.

  Result:  not yet run
  """

  dev_lines: int | None = None
  source_vocab_size: int = 8000
  vocab_by_corpus: bool = True
  shared_vocab: bool = True
  temperature: float = 2.0
  batch_tokens: int = 4096
  max_length: int = 128
  packing: bool = True
  num_groups: int = 8
  model_dim: int = 128
  ff_dim: int = 384
  num_heads: int = 4
  head_dim: int = 32
  encoder_layers: int = 4
  decoder_layers: int = 4
  input_dropout: float = 0.2
  residual_dropout: float = 0.2
  attention_dropout: float = 0.1
  optimizer: str = 'adam'
  schedule: str = 'warmup_linear'
  learning_rate: float = 4e-3
  warmup_steps: int | None = None
  clip_norm: float = 1.0
  max_steps: int | None = None
  eval_every: int | None = None
  patience: int = 8


@registry.register
class MoE8E(Dense):
  """Starter with 8 experts in every other layer: 4.19M weights, 2.61M used by a token.

  Start here: the model for text of your own.

  Result:  Multi30k, test_2016_flickr, de-en, step 3520: 40.8 BLEU;
           BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0, NVIDIA H200. docs/quality.md.
  """

  ff_dim: int = 256
  num_experts: int = 8
  capacity_factor: float | None = None


@registry.register
class Tiny(MoE8E):
  """MoE8E at the size of a test, 4 groups, 4 heads, 8 experts: 120k weights, 70.4k used by a token."""

  source_vocab_size: int = 600
  batch_tokens: int = 512
  max_length: int = 64
  num_groups: int = 4
  model_dim: int = 32
  ff_dim: int = 64
  head_dim: int = 8
  encoder_layers: int = 2
  decoder_layers: int = 2
