"""A registered translation model: every value that makes it what it is, in one frozen dataclass."""

from __future__ import annotations

import dataclasses

from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.remat import POLICIES
from lingvo_moe.layers.stack import Stack
from lingvo_moe.optim import optimizer
from lingvo_moe.optim import schedule
from lingvo_moe.program import Program
from lingvo_moe.tasks.mt.data_config import DataConfig
from lingvo_moe.tasks.mt.model import TranslationModel
from lingvo_moe.tasks.mt.task import TranslationTask

_OPTIMIZERS = {'adafactor': optimizer.Adafactor, 'adam': optimizer.Adam}
_SCHEDULES = ('inverse_sqrt', 'warmup_inverse_sqrt', 'constant')
_ACTIVATION_DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class MtConfig(DataConfig, TranslationTask):
  """Model, training and decoding; DataConfig holds the corpus and its batches.

  Attributes:
    model_dim: M.
    ff_dim: H, of the dense feed-forward layers and of every expert.
    num_heads: N.
    head_dim: K.
    encoder_layers: layers of the encoder.
    decoder_layers: layers of the decoder.
    num_experts: E of each layer with experts; 0 makes a dense model.
    moe_every: every moe_every-th layer carries experts.
    capacity_factor: C = capacity_factor * S / E; 2 gives both choices of every token a slot at perfect balance.
    dispatch: how tokens get to experts: 'gather' or 'einsum'; where shapes are dynamic MoE tells when it is by neither.
    activation_dtype: 'float32' or 'bfloat16'; weights, their updates, gates, norms, softmaxes and the output scores are
      float32 in both; attention scores are products in this type, of which the softmax is taken in float32.
    scan_layers: whether each stack is one loop over its blocks of moe_every layers, so that the size of the program does
      not grow with depth; its blocks are rematerialised.
    remat: what is made again for its gradient and not kept: 'none', 'block' (of a layer all but its input), or
      'attention' (what it makes inside).
    micro_batches: parts of a batch that are computed one after the other, their gradients added up.
    input_dropout: on the embedded input.
    residual_dropout: on every residual branch.
    attention_dropout: on the attention weights.
    label_smoothing: share of the target spread over all symbols.
    aux_loss_weight: k, of the gates' auxiliary loss, summed over layers.
    z_loss_weight: of the square of the output softmax's log normaliser.
    optimizer: 'adafactor' or 'adam'.
    schedule: 'inverse_sqrt' (learning_rate / sqrt(max(t, warmup_steps))), 'warmup_inverse_sqrt' (linear to
      learning_rate at warmup_steps, then falling as 1 / sqrt(t)) or 'constant'.
    learning_rate: see schedule.
    warmup_steps: see schedule.
    clip_norm: largest global norm of the gradients; 0 for no limit.
    max_steps: where training ends.
    log_every: steps between lines of train.jsonl and of the event file.
    eval_every: steps between evaluations of dev cross-entropy, each of which also saves.
    save_every: steps between checkpoints; 0: only when evaluating.
    keep_checkpoints: how many of the newest are kept, beside the best.
    keep_every: checkpoints of steps that are multiples of it are kept for good; 0: none.
    patience: evaluations without a gain on dev after which training ends; 0: never before max_steps.
    eval_sentences: dev sentences of a pair that are evaluated; 0: all.
    beam_size: W, hypotheses kept while decoding.
    length_norm_alpha: GNMT's alpha.
    decode_ratio: a translation has at most decode_ratio * source tokens + decode_extra symbols.
    decode_extra: see decode_ratio.
  """

  model_dim: int = 128
  ff_dim: int = 256
  num_heads: int = 4
  head_dim: int = 32
  encoder_layers: int = 4
  decoder_layers: int = 4
  num_experts: int = 0
  moe_every: int = 2
  capacity_factor: float = 2.0
  dispatch: str = 'gather'
  activation_dtype: str = 'float32'
  scan_layers: bool = False
  remat: str = 'none'
  micro_batches: int = 1
  input_dropout: float = 0.1
  residual_dropout: float = 0.1
  attention_dropout: float = 0.1
  label_smoothing: float = 0.1
  aux_loss_weight: float = 0.01
  z_loss_weight: float = 0.0
  optimizer: str = 'adafactor'
  schedule: str = 'inverse_sqrt'
  learning_rate: float = 1.0
  warmup_steps: int = 10_000
  clip_norm: float = 0.0
  max_steps: int = 100_000
  log_every: int = 1
  eval_every: int = 1000
  save_every: int = 0
  keep_checkpoints: int = 3
  keep_every: int = 0
  patience: int = 0
  eval_sentences: int = 0
  beam_size: int = 4
  length_norm_alpha: float = 0.8
  decode_ratio: float = 2.0
  decode_extra: int = 10

  def _check_ranges(self) -> None:
    super()._check_ranges()
    for name in (
      'model_dim',
      'ff_dim',
      'num_heads',
      'head_dim',
      'encoder_layers',
      'decoder_layers',
      'warmup_steps',
      'log_every',
      'eval_every',
      'keep_checkpoints',
      'beam_size',
      'micro_batches',
    ):
      if getattr(self, name) < 1:
        self._refuse(name, 'at least 1')
    for name in (
      'num_experts',
      'moe_every',
      'aux_loss_weight',
      'z_loss_weight',
      'clip_norm',
      'max_steps',
      'save_every',
      'keep_every',
      'patience',
      'eval_sentences',
      'length_norm_alpha',
      'decode_ratio',
      'decode_extra',
    ):
      if not getattr(self, name) >= 0:
        self._refuse(name, 'at least 0')
    for name in ('input_dropout', 'residual_dropout', 'attention_dropout', 'label_smoothing'):
      if not 0 <= getattr(self, name) < 1:
        self._refuse(name, 'at least 0 and below 1')
    for name in ('capacity_factor', 'learning_rate'):
      if not getattr(self, name) > 0:
        self._refuse(name, 'above 0')
    if self.num_experts == 1:
      self._refuse('num_experts', '2 or more (each token visits two), or 0 for a dense model')
    for name, known in (
      ('optimizer', tuple(_OPTIMIZERS)),
      ('schedule', _SCHEDULES),
      ('dispatch', tuple(DISPATCHERS)),
      ('activation_dtype', _ACTIVATION_DTYPES),
      ('remat', POLICIES),
    ):
      if getattr(self, name) not in known:
        self._refuse(name, 'one of ' + ', '.join(known))
    if self.num_groups % self.micro_batches:
      self._refuse('micro_batches', f'a divisor of num_groups={self.num_groups}')
    if self.scan_layers:
      if self.remat != 'block':
        self._refuse('remat', "'block' with scan_layers, which keeps the inputs of its blocks alone")
      period = self.moe_every if self.num_experts and self.moe_every else 1
      for name in ('encoder_layers', 'decoder_layers'):
        if getattr(self, name) % period:
          self._refuse(name, f'a multiple of moe_every={period} with scan_layers, which repeats blocks of so many')

  def task(self) -> TranslationModel:
    """The model that these values describe."""
    attention = Attention(self.model_dim, self.num_heads, self.head_dim, self.attention_dropout)
    moe = None
    if self.num_experts:
      groups = self.num_groups // self.micro_batches  # of what it is given at once
      moe = MoE(self.model_dim, self.ff_dim, self.num_experts, groups, self.capacity_factor, self.dispatch)
    stack = lambda layers, is_decoder: Stack(
      num_layers=layers,
      attention=attention,
      ffn=FeedForward(self.model_dim, self.ff_dim),
      moe=moe,
      moe_every=self.moe_every,
      cross_attention=is_decoder,
      residual_dropout=self.residual_dropout,
      scan=self.scan_layers,
      remat=self.remat,
    )
    source = Embedding(self.source_vocab_size, self.model_dim)
    target = source if self.shared_vocab else Embedding(self.target_vocab_size, self.model_dim)
    return TranslationModel(
      encoder=stack(self.encoder_layers, False),
      decoder=stack(self.decoder_layers, True),
      target_embedding=target,
      source_embedding=None if self.shared_vocab else source,
      input_dropout=self.input_dropout,
      label_smoothing=self.label_smoothing,
      aux_loss_weight=self.aux_loss_weight,
      z_loss_weight=self.z_loss_weight,
      activation_dtype=self.activation_dtype,
    )

  def program(self) -> Program:
    """The model and how it learns."""
    if self.schedule == 'inverse_sqrt':
      rates = schedule.InverseSquareRoot(self.learning_rate, self.warmup_steps)
    elif self.schedule == 'warmup_inverse_sqrt':
      rates = schedule.WarmupInverseSquareRoot(self.learning_rate, self.warmup_steps)
    else:
      rates = schedule.Constant(self.learning_rate)
    return Program(
      self.task(),
      _OPTIMIZERS[self.optimizer](),
      rates,
      clip_norm=self.clip_norm,
      seed=self.seed,
      num_groups=self.num_groups,
      micro_batches=self.micro_batches,
    )
