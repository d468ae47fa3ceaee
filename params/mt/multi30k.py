"""Multi30k: image captions in German, French and Czech, into English and back.

29,000 triples of sentences a language; plain files train.{de,fr,cs,en}[.gz], val.*, test_2016_flickr.*. With so little
text small models do best: 4 + 4 layers, M=128, H=256, 4 heads (Wu et al., 2021, 'Good for Misconceived Reasons',
arXiv 2105.14462, call it 'tiny').
"""

from __future__ import annotations

from lingvo_moe.config import registry
from lingvo_moe.tasks.mt.mt_config import MtConfig


@registry.register
class Tiny(MtConfig):
  """German, French and Czech into English with the dense 'tiny' model: 2.86M weights, 1.84M used by a token.

  Result:  not yet run
  """

  pairs: str = 'de-en,fr-en,cs-en'
  split_files: tuple[tuple[str, str], ...] = (('dev', 'val'), ('test', 'test_2016_flickr'))
  source_vocab_size: int = 8000
  target_vocab_size: int = 4000
  batch_tokens: int = 3072
  max_length: int = 96
  num_groups: int = 8
  model_dim: int = 128
  ff_dim: int = 256
  num_heads: int = 4
  head_dim: int = 32
  input_dropout: float = 0.2
  residual_dropout: float = 0.2
  attention_dropout: float = 0.1
  optimizer: str = 'adam'
  schedule: str = 'warmup_inverse_sqrt'
  learning_rate: float = 5e-3
  warmup_steps: int = 2000
  clip_norm: float = 1.0
  max_steps: int = 30_000
  eval_every: int = 500


@registry.register
class MoE8E(Tiny):
  """Tiny with 8 experts in every other layer: 4.7M weights, 2.1M used by a token.

  Result:  test_2016_flickr, step 10,000 (dev loss 1.5719; 1.5722 at 8500): de-en 40.3, fr-en 49.9, cs-en 38.7 BLEU;
           step 6000: 39.5, 48.6, 37.6; BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0, one core of
           an AMD EPYC, 2 hours
  """

  num_experts: int = 8


@registry.register
class MoE16E(Tiny):
  """Tiny with 16 experts in every other layer: 6.8M weights, 2.1M used by a token.

  Result:  with experts_in=encoder, the average of steps 10,000 to 12,000: de-en 41.6, fr-en 51.9, cs-en 40.2 BLEU;
           BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. docs/quality.md.
  """

  num_experts: int = 16


@registry.register
class Dense(Tiny):
  """The experts' dense twin: 3.12M weights, 2.1M used by a token.

  Two experts of H=256 a token in every other layer cost what 1.5 x H costs in every layer: so ff_dim is 384, and a
  token costs the same FLOPs in both.

  Result:  test_2016_flickr, step 6000: de-en 40.4, fr-en 49.1, cs-en 37.4 BLEU (MoE8E at that step 39.5, 48.6, 37.6);
           BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0, one core of an AMD EPYC
  """

  ff_dim: int = 384


@registry.register
class EnDe(Tiny):
  """English into German, 'tiny' with a shared vocabulary as published: 2.35M weights, 2.35M used by a token.

  Result:  test_2016_flickr, step 9750 (dev loss 1.566, the best): 40.0 BLEU, lower-cased and tokenised 40.3;
           BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0, one shared core of an AMD EPYC
  """

  pairs: str = 'en-de'
  shared_vocab: bool = True
  batch_tokens: int = 4096
  input_dropout: float = 0.3
  residual_dropout: float = 0.3
  attention_dropout: float = 0.3
  max_steps: int = 12_000
  eval_every: int = 250


@registry.register
class DeEn(EnDe):
  """German into English by itself, otherwise as EnDe: 2.35M weights, 2.35M used by a token.

  Result:  test_2016_flickr, step 5300 with packing=True: 40.6 BLEU;
           BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0, NVIDIA H200. docs/quality.md.
  """

  pairs: str = 'de-en'


@registry.register
class Student(DeEn):
  """Student of distilled text, 8 encoder layers, 2 decoder layers, one key/value head: 2.44M weights.

  German into English, as DeEn. A deep encoder and a shallow decoder translate as well and faster (Kasai et al., 2021,
  arXiv 2006.10369); with one key/value head a step of decoding reads a quarter of the keys and values (GQA, arXiv
  2305.13245). lingvo-moe distill makes the text.

  Result:  test_2016_flickr, distilled by mt.starter.MoE8E (40.8), step 3500 and 400 more: 39.7 BLEU;
           BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. docs/quality.md.
  """

  vocab_by_corpus: bool = True
  packing: bool = True
  encoder_layers: int = 8
  decoder_layers: int = 2
  num_kv_heads: int = 1
  input_dropout: float = 0.2
  residual_dropout: float = 0.2
  attention_dropout: float = 0.1
  schedule: str = 'warmup_linear'
  learning_rate: float = 4e-3
  warmup_steps: int = 600
  max_steps: int = 6000
  eval_every: int = 500


@registry.register
class BothWays(EnDe):
  """German and English, both ways in one model with a shared vocabulary: 2.35M weights, 2.35M used by a token.

  Result:  the average of steps 18,000 to 20,000, two seeds: test_2016_flickr de-en 42.8 and 42.5, en-de 41.3 and 41.2
           BLEU; BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. docs/quality.md.
  """

  pairs: str = 'en-de,de-en'
  packing: bool = True
  input_dropout: float = 0.2
  residual_dropout: float = 0.2
  attention_dropout: float = 0.1
  max_steps: int = 20_000
  keep_every: int = 500


@registry.register
class BothWaysMoE8E(BothWays):
  """BothWays with 8 experts in every other layer: 4.19M weights, 2.61M used by a token.

  Result:  the average of steps 18,000 to 20,000: test_2016_flickr de-en 43.3, en-de 40.6 BLEU;
           BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. docs/quality.md.
  """

  num_experts: int = 8


@registry.register
class ManyToManyDense(Tiny):
  """All 12 directions among German, French, Czech and English, without experts: 1.11M weights, 1.11M used by a token.

  As many FLOPs a token as with experts; half of the width of 'tiny', so that capacity is short.

  Result:  test_2016_flickr, the average of steps 6500 to 8000: mean of 12 directions 27.4 and 28.2 BLEU with two
           seeds; BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. docs/quality.md.
  """

  pairs: str = 'de-en,en-de,fr-en,en-fr,cs-en,en-cs,de-fr,fr-de,de-cs,cs-de,fr-cs,cs-fr'
  shared_vocab: bool = True
  batch_tokens: int = 2048
  num_groups: int = 1
  model_dim: int = 64
  ff_dim: int = 384
  head_dim: int = 16
  input_dropout: float = 0.1
  residual_dropout: float = 0.1
  attention_dropout: float = 0.0
  learning_rate: float = 4e-3
  warmup_steps: int = 1000
  max_steps: int = 8000
  eval_every: int = 500
  keep_every: int = 500
  eval_sentences: int = 100


@registry.register
class ManyToManyMoE8E(ManyToManyDense):
  """All 12 directions, 8 experts in every other layer: 1.9M weights, 1.11M used by a token.

  Result:  test_2016_flickr, the average of steps 6500 to 8000: mean of 12 directions 28.7 and 29.2 BLEU with two
           seeds; BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. docs/quality.md.
  """

  ff_dim: int = 256
  num_experts: int = 8
  capacity_factor: float | None = 4.0
