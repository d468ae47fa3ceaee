"""Configuration of a translation model, its training and decoding: one frozen dataclass of values."""

from __future__ import annotations

import dataclasses

from lingvo_moe.core import fields
from lingvo_moe.core.fields import field
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.remat import POLICIES
from lingvo_moe.layers.stack import Stack
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.adam import Adam
from lingvo_moe.optim.optimizer import Optimizer
from lingvo_moe.program import Program
from lingvo_moe.tasks.mt.data_config import DataConfig
from lingvo_moe.tasks.mt.model import TranslationModel
from lingvo_moe.tasks.mt.task import TranslationTask


@dataclasses.dataclass(frozen=True)
class MtConfig(DataConfig, TranslationTask):
  """Model, training and decoding of a translation model."""

  model_dim: int = field(128, 'M, the width of embeddings and layers.', at_least=1)
  ff_dim: int = field(256, 'H, the width of the dense feed-forward layers and of every expert.', at_least=1)
  num_heads: int = field(4, 'N, attention heads.', at_least=1)
  head_dim: int = field(32, 'K, the width of an attention head.', at_least=1)
  encoder_layers: int = field(4, 'Layers of the encoder.', at_least=1)
  decoder_layers: int = field(4, 'Layers of the decoder.', at_least=1)
  num_experts: int = field(0, 'E, experts of each MoE layer; 0: a dense model.', at_least=0)
  moe_every: int = field(2, 'Every moe_every-th layer of a stack is a MoE layer; 0: none is.', at_least=0)
  experts_in: str = field('both', 'Stacks that have MoE layers.', choices=('both', 'encoder', 'decoder'))
  second_choice: str = field(
    'random',
    'Second choices that training takes: random, with probability 2 * gate as in GShard; or always.',
    choices=('random', 'always'),
  )
  gate_init_scale: float = field(1.0, "Factor of the gates' initial weights.", above=0)
  capacity_factor: float | None = field(
    2.0,
    'C = capacity_factor * S / E in training; 2 has a slot for both choices of every token at perfect balance. '
    'None: dropless, no token is dropped in training, as none is at inference.',
    above=0,
  )
  round_capacity_factor: float = field(
    2.0,
    'Under XLA, where nothing is dropped: experts take round_capacity_factor * S / E slots of a group at a time, in as '
    'many rounds as the longest queue needs, to the same numbers.',
    above=0,
    may_change=True,
  )
  capacity_chunks: int = field(
    1,
    'Parts of the slots of experts that are sent, computed and returned independently in training, to the same numbers: '
    'on a mesh, the AllToAlls of one can overlap with the computation of another.',
    at_least=1,
    may_change=True,
  )
  dispatch: str = field(
    'auto',
    'How tokens get to experts and back, to the same numbers; auto: grouped on CPUs, gather under XLA.',
    choices=('auto', *DISPATCHERS),
    may_change=True,
  )
  activation_dtype: str = field(
    'float32',
    'Type of activations. Weights, their updates, gates, norms, softmaxes and output scores are float32 in any case.',
    choices=('float32', 'bfloat16'),
  )
  scan_layers: bool = field(
    False,
    'Each stack as one loop over blocks of moe_every layers, so that program size is constant in depth.',
    may_change=True,
  )
  remat: str = field(
    'none',
    'Activations that backprop recomputes. block: all of a layer but its input; attention: those inside attention.',
    choices=POLICIES,
    may_change=True,
  )
  micro_batches: int = field(
    1, 'Parts of a batch that are computed one after another, their gradients summed.', at_least=1, may_change=True
  )
  input_dropout: float = field(0.1, 'Dropout of the embedded input.', at_least=0, below=1)
  residual_dropout: float = field(0.1, 'Dropout of every residual branch.', at_least=0, below=1)
  attention_dropout: float = field(0.1, 'Dropout of the attention weights.', at_least=0, below=1)
  label_smoothing: float = field(0.1, 'Share of the target that is spread over all symbols.', at_least=0, below=1)
  ffn_dropout: float = field(0.0, 'Dropout of the hidden layer of dense feed-forwards.', at_least=0, below=1)
  expert_dropout: float = field(
    0.0, "Dropout of the hidden layer of experts, as Switch Transformers' expert dropout.", at_least=0, below=1
  )
  expert_output_masking: float = field(
    0.0, 'Share of tokens that get no output of experts in training, as in NLLB-200.', at_least=0, below=1
  )
  aux_loss_weight: float = field(0.01, "k, weight of the gates' auxiliary loss, summed over layers.", at_least=0)
  router_z_loss_weight: float = field(
    0.0,
    "Weight of the gates' z-loss (Zoph et al., arXiv 2202.08906), the mean over tokens of log(sum(exp(logits)))^2, "
    'summed over layers.',
    at_least=0,
  )
  z_loss_weight: float = field(0.0, "Weight of the square of the output softmax's log normaliser.", at_least=0)
  optimizer: str = field('adafactor', 'Optimizer of the weights.', choices=('adafactor', 'adam'))
  beta2_cap: float = field(
    0.99, "Adafactor's second moment decays by min(beta2_cap, 1 - t^-0.8); 1: no cap, as in Lingvo.", above=0, at_most=1
  )
  schedule: str = field(
    'inverse_sqrt',
    'Learning rate at step t. inverse_sqrt: learning_rate / sqrt(max(t, warmup_steps)); warmup_inverse_sqrt: linear to '
    'learning_rate at warmup_steps, then falling as 1 / sqrt(t).',
    choices=('inverse_sqrt', 'warmup_inverse_sqrt', 'constant'),
  )
  learning_rate: float = field(1.0, 'Factor of the schedule.', above=0)
  warmup_steps: int = field(10_000, 'Steps before the schedule falls.', at_least=1)
  clip_norm: float = field(0.0, 'Largest global norm of the gradients; 0: no limit.', at_least=0)
  max_steps: int = field(100_000, 'Step at which training ends.', at_least=0, may_change=True)
  log_every: int = field(1, 'Steps between lines of train.jsonl and of the event file.', at_least=1, may_change=True)
  eval_every: int = field(
    1000, 'Steps between evaluations of dev cross-entropy, each of which also saves.', at_least=1, may_change=True
  )
  save_every: int = field(0, 'Steps between checkpoints; 0: only when evaluating.', at_least=0, may_change=True)
  keep_checkpoints: int = field(3, 'Newest checkpoints that are kept, beside the best.', at_least=1, may_change=True)
  keep_every: int = field(
    0, 'Checkpoints of steps that are multiples of it are kept for good; 0: none.', at_least=0, may_change=True
  )
  patience: int = field(
    0, 'Evaluations without a gain on dev after which training ends; 0: no limit.', at_least=0, may_change=True
  )
  eval_sentences: int = field(0, 'Dev sentences of a pair that are evaluated; 0: all.', at_least=0, may_change=True)
  beam_size: int = field(4, 'W, hypotheses of a beam search.', at_least=1, may_change=True)
  length_norm_alpha: float = field(0.8, "GNMT's alpha of length normalisation.", at_least=0, may_change=True)
  decode_ratio: float = field(
    2.0, 'A translation has at most decode_ratio * source tokens + decode_extra symbols.', at_least=0, may_change=True
  )
  decode_extra: int = field(10, 'See decode_ratio.', at_least=0, may_change=True)

  def _check_together(self) -> None:
    super()._check_together()
    if self.optimizer != 'adafactor' and self.beta2_cap != type(self).beta2_cap:
      fields.refuse(
        self, 'beta2_cap', f'left as it is with optimizer = {self.optimizer!r}', 'it is for Adafactor alone'
      )
    if self.num_experts == 1:
      fields.refuse(self, 'num_experts', '2 or more (each token visits two), or 0 for a dense model')
    if self.capacity_chunks > 1 and self.capacity_factor is None:
      rule = '1 with capacity_factor = None, which takes slots in rounds'
      fields.refuse(self, 'capacity_chunks', rule)
    if self.num_groups % self.micro_batches:
      fields.refuse(self, 'micro_batches', f'a divisor of num_groups={self.num_groups}')
    if self.scan_layers:
      if self.remat != 'block':
        fields.refuse(self, 'remat', "'block' with scan_layers, which keeps the inputs of its blocks alone")
      period = self.moe_every if self.num_experts and self.moe_every else 1
      for name in ('encoder_layers', 'decoder_layers'):
        if getattr(self, name) % period:
          rule = f'a multiple of moe_every={period} with scan_layers, which repeats blocks of so many'
          fields.refuse(self, name, rule)

  def task(self) -> TranslationModel:
    """The model that these values describe."""
    attention = Attention(self.model_dim, self.num_heads, self.head_dim, self.attention_dropout)
    moe = None
    if self.num_experts:
      groups = self.num_groups // self.micro_batches  # of what it is given at once
      moe = MoE(
        self.model_dim,
        self.ff_dim,
        self.num_experts,
        num_groups=groups,
        capacity_factor=self.capacity_factor,
        dispatch=self.dispatch,
        round_capacity_factor=self.round_capacity_factor,
        second_choice=self.second_choice,
        gate_scale=self.gate_init_scale,
        expert_dropout=self.expert_dropout,
        output_masking=self.expert_output_masking,
        capacity_chunks=self.capacity_chunks,
      )
    stack = lambda layers, is_decoder: Stack(
      num_layers=layers,
      attention=attention,
      ffn=FeedForward(self.model_dim, self.ff_dim, self.ffn_dropout),
      moe=moe if self.experts_in in ('both', 'decoder' if is_decoder else 'encoder') else None,
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
      router_z_loss_weight=self.router_z_loss_weight,
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
      self._optimizer(),
      rates,
      clip_norm=self.clip_norm,
      seed=self.seed,
      num_groups=self.num_groups,
      micro_batches=self.micro_batches,
    )

  def _optimizer(self) -> Optimizer:
    return Adafactor(beta2_cap=self.beta2_cap) if self.optimizer == 'adafactor' else Adam()
