"""Configuration that models share: sizes, experts, regularisers, optimizer, and when to log, save and stop.

A task's configuration derives from it, or from that of Transformers (transformer_config.py), adds its stacks, its data
and its decoding, and says in `model()` which model they make; see tasks/mt/mt_config.py and tasks/lm/lm_config.py.
"""

import dataclasses
import warnings
from typing import Any, Literal, Self, TypeVar

from lingvo_moe.config import fields
from lingvo_moe.config.fields import ON, changeable, field
from lingvo_moe.core.errors import UserError
from lingvo_moe.inputs.batch_config import BatchConfig
from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.layers.experts import EXPERTS
from lingvo_moe.layers.gates import table as gates
from lingvo_moe.layers.gates.gate import Gate
from lingvo_moe.layers.lora import Lora
from lingvo_moe.layers.moe import MoE
from lingvo_moe.optim.moving_average import WithMovingAverage
from lingvo_moe.optim.optimizer import Optimizer
from lingvo_moe.optim.schedule import Schedule
from lingvo_moe.optim.tables import OPTIMIZERS, SCHEDULES, ThatRead
from lingvo_moe.program import Program
from lingvo_moe.search import repetition as repetition_lib
from lingvo_moe.search.beam import EARLY_STOPPING, MARGIN
from lingvo_moe.tasks import run_length

_Part = TypeVar('_Part')
_NO_END = 2**31 - 1
_CHOSEN = '; None: chosen when a run begins, '
# Conditions under which fields have an effect.
EXPERTS_THERE = {'num_experts': ON}


def _of_gates(has: str) -> dict[str, Any]:
  return {**EXPERTS_THERE, 'gate': gates.ThatHave(has)}


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Values of samples, in the order of text.continuations.Sampling."""

  sample_temperature: float = changeable(1.0, 'Divides the logits of a sample; 0: greedy.', at_least=0)
  top_k: int = changeable(0, 'Samples draw from the k likeliest symbols; 0: from all.', at_least=0)
  top_p: float = changeable(
    1.0, 'Samples draw from the fewest symbols whose probabilities sum to p.', at_least=1e-6, at_most=1
  )
  sample_seed: int = changeable(0, 'Seed of samples.', at_least=0)


@dataclasses.dataclass(frozen=True)
class ModelConfig(BatchConfig):
  """Any model: layers, training and checkpoints.

  A subclass has `model()`.
  """

  model_dim: int = field(128, 'M, the width of embeddings and layers.', at_least=1)
  ff_dim: int = field(
    256,
    'H, the width of dense layers, and of experts without expert_dim.',
    at_least=1,
    when=({'has_dense_layers': ON}, {'expert_dim': (0,)}),
  )
  num_experts: int = field(0, 'E, experts of each MoE layer; 0: a dense model.', at_least=0, when={'moe_every': ON})
  gate: str = field(
    'top2',
    'Gate, which chooses the experts of each token; see docs/gates.md.',
    choices=gates.GATES,
    when=EXPERTS_THERE,
  )
  choices: int = field(
    2, 'k, experts of a token; of a hierarchical gate, of each level.', at_least=1, when=_of_gates('choices')
  )
  groups_of_experts: int = field(
    0,
    'Groups of experts, which divide num_experts: of a hierarchical gate; or of top_k, whose tokens choose among the '
    'experts of chosen_groups alone (DeepSeek-V3); 0: none.',
    at_least=0,
    when=_of_gates('groups_of_experts'),
  )
  chosen_groups: int = field(
    1,
    'Groups among whose experts a token of top_k chooses.',
    at_least=1,
    when={**_of_gates('chosen_groups'), 'groups_of_experts': ON},
  )
  router_score: str = field(
    'softmax', 'Scores of experts, of the logits.', choices=('softmax', 'sigmoid'), when=_of_gates('router_score')
  )
  router_bias_update_rate: float = field(
    0.0,
    'Loss-free balancing of top_k: a bias per expert, which the choice alone sees, moves by so much with each update '
    '(arXiv 2408.15664, which has 0.001); 0: no bias. The balance loss remains: set aux_loss_weight=0.',
    at_least=0,
    at_most=1,
    when=_of_gates('router_bias_update_rate'),
  )
  balance_over: str = field(
    'group',
    "Tokens whose choices and gates the balance loss multiplies: each group's, as in GShard, or those of all groups of "
    "a batch (arXiv 2501.11873), micro-batches' and devices' together.",
    choices=('group', 'batch'),
    when=_of_gates('balance_over'),
  )
  expert: str = field(
    'relu', 'Kind of the experts: feed-forward, gated, or of two layers.', choices=EXPERTS, when=EXPERTS_THERE
  )
  expert_dim: int = field(0, 'H of an expert; 0: ff_dim.', at_least=0, when=EXPERTS_THERE)
  shared_experts: int = field(
    0,
    'Experts that every token visits in addition to the chosen ones (DeepSeekMoE, arXiv 2401.06066).',
    at_least=0,
    when=EXPERTS_THERE,
  )
  second_choice: str = field(
    'random',
    'Second choices that training takes: random, with probability gate / second_choice_threshold; or always.',
    choices=('random', 'always'),
    when=_of_gates('second_choice'),
  )
  second_choice_threshold: float = field(
    0.5,
    "Gate from which on a random second choice is always taken: 0.5 is GShard's 2 * gate, 1 the gate.",
    above=0,
    when={**_of_gates('second_choice_threshold'), 'second_choice': ('random',)},
  )
  gate_init_scale: float = field(
    1.0,
    "Factor of the gates' initial weights.",
    above=0,
    when={**_of_gates('gate_init_scale'), 'init_scale': (0,)},
  )
  init_scale: float = field(
    0.0,
    "s of Switch's initial values, truncated normals of sigma sqrt(s / inputs) for all matrices; 0: Glorot's.",
    at_least=0,
  )
  router_jitter: float = field(
    0.0,
    "Training multiplies each feature of a gate's input by 1 +- up to router_jitter.",
    at_least=0,
    below=1,
    when=EXPERTS_THERE,
  )
  router_dtype: str = field(
    'float32',
    'Type of the products of gates, whose sums and softmaxes are float32.',
    choices=('float32', 'bfloat16'),
    when=EXPERTS_THERE,
  )
  capacity_factor: float | Literal['auto'] | None = field(
    'auto',
    'C = capacity_factor * S / E, slots of an expert for a group of S tokens in training. A factor of k has a slot for '
    'k choices of every token at perfect balance; auto: 2 or, where a token has more choices, as many. '
    'None: dropless, no token is dropped in training, as none is at inference.',
    above=0,
    open=('auto',),
    chosen_by='slots_factor',
    when=_of_gates('has_capacity'),
  )
  round_capacity_factor: float = changeable(
    2.0,
    'Under XLA, where nothing is dropped: experts take round_capacity_factor * S / E slots of a group at a time, in as '
    'many rounds as the longest queue needs, to the same numbers.',
    above=0,
    when=_of_gates('has_capacity'),
  )
  capacity_chunks: int = changeable(
    1,
    'Parts of the slots of experts that are sent, computed and returned independently in training, to the same '
    'numbers: on a mesh, the AllToAlls of one can overlap with the computation of another.',
    at_least=1,
    when=EXPERTS_THERE,
  )
  dispatch: str = changeable(
    'auto',
    'Way of tokens to experts and back, which changes no result; auto: grouped on CPUs, gather under XLA.',
    choices=('auto', *DISPATCHERS),
    when=EXPERTS_THERE,
  )
  activation_dtype: str = field(
    'float32',
    'Type of activations. Weights, their updates, gates, norms and softmaxes are float32 in any case; so are output '
    'scores, except in training on a CPU (under XLA their table is rounded to bfloat16). A CPU without units for '
    'bfloat16 computes in float32, and the job says so.',
    choices=('float32', 'bfloat16'),
  )
  micro_batches: int = changeable(
    1,
    'Parts of a batch that are computed one after another, their gradients summed; on a mesh with an axis stage, by '
    'each stage in turn. The balance losses of the gates noisy_top_k and hierarchical are then of each part.',
    at_least=1,
  )
  pipeline_repeats: int = changeable(
    1,
    'Times that a micro-batch passes the stages of a mesh with an axis stage, through other layers each time: the '
    'bubble is (stages - 1) / (pipeline_repeats * micro_batches + stages - 1).',
    at_least=1,
  )
  input_dropout: float = field(0.1, 'Dropout of the embedded input.', at_least=0, below=1)
  residual_dropout: float = field(0.1, 'Dropout of every residual branch.', at_least=0, below=1)
  label_smoothing: float = field(0.1, 'Share of the target that is spread over all symbols.', at_least=0, below=1)
  expert_dropout: float = field(
    0.0,
    "Dropout of the hidden layer of experts, as Switch Transformers' expert dropout.",
    at_least=0,
    below=1,
    when=EXPERTS_THERE,
  )
  expert_output_masking: float = field(
    0.0,
    'Share of tokens that get no output of experts in training, as in NLLB-200.',
    at_least=0,
    below=1,
    when=EXPERTS_THERE,
  )
  aux_loss_weight: float = field(
    0.01,
    "k, weight of the gates' auxiliary loss, summed over layers.",
    at_least=0,
    when=_of_gates('has_balance_loss'),
  )
  router_z_loss_weight: float = field(
    0.0,
    "Weight of the gates' z-loss (Zoph et al., arXiv 2202.08906), the mean over tokens of log(sum(exp(logits)))^2, "
    'summed over layers.',
    at_least=0,
    when=EXPERTS_THERE,
  )
  z_loss_weight: float = field(0.0, "Weight of the square of the output softmax's log normaliser.", at_least=0)
  optimizer: str = field('adafactor', 'Optimizer of the weights.', choices=OPTIMIZERS)
  adam_beta2: float | None = field(
    None,
    'Decay rate of the second moments; None: 0.98 of adam, 0.999 of adamw.',
    above=0,
    below=1,
    when={'optimizer': ThatRead(OPTIMIZERS, 'adam_beta2')},
  )
  weight_decay: float = field(
    0.01,
    'Share of the learning rate by which an update shrinks matrices; not norms, not biases.',
    at_least=0,
    when={'optimizer': ThatRead(OPTIMIZERS, 'weight_decay')},
  )
  beta2_cap: float = field(
    0.99,
    'The second moment decays by min(beta2_cap, 1 - t^-0.8); 1: no cap, as in Lingvo.',
    above=0,
    at_most=1,
    when={'optimizer': ThatRead(OPTIMIZERS, 'beta2_cap')},
  )
  average_decay: float = field(
    0.0,
    'Decay of an exponential moving average of the weights, such as 0.999, which lingvo-moe average --exponential '
    'takes out of a checkpoint; 0: none is kept.',
    at_least=0,
    below=1,
  )
  schedule: str = field(
    'inverse_sqrt',
    'Learning rate at step t. inverse_sqrt: learning_rate / sqrt(max(t, warmup_steps)); the others rise linearly to '
    'learning_rate at warmup_steps. warmup_inverse_sqrt: then falling as 1 / sqrt(t); warmup_linear: then falling '
    'linearly, to 0 after max_steps; cosine: as half a cosine, to final_rate at max_steps; wsd (warm-up, stable, '
    'decay): level, and linear to final_rate over the last decay_share of max_steps. constant: always learning_rate.',
    choices=SCHEDULES,
  )
  final_rate: float = field(
    0.0,
    'Share of learning_rate at max_steps.',
    at_least=0,
    at_most=1,
    when={'schedule': ThatRead(SCHEDULES, 'final_rate')},
  )
  decay_share: float = field(
    0.2,
    'Share of max_steps, the last, over which the rate falls.',
    above=0,
    at_most=1,
    when={'schedule': ThatRead(SCHEDULES, 'decay_share')},
  )
  learning_rate: float = field(1.0, 'Factor of the schedule.', above=0)
  warmup_steps: int | None = field(
    10_000,
    f'Steps before the schedule falls{_CHOSEN}a tenth of max_steps, 4000 at most.',
    at_least=1,
    settled=True,
    open=(None,),
    when={'schedule': ThatRead(SCHEDULES, 'warmup_steps')},
  )
  freeze: str = field(
    '',
    "Parts of the weights that stay as they begin, 'encoder' or 'encoder,source_embedding', for runs with --init_from.",
  )
  lora_rank: int = field(
    0,
    'Rank of LoRA adapters (arXiv 2106.09685), which are trained in place of all weights, for runs that begin with '
    '--init_from or an import; 0: none.',
    at_least=0,
  )
  lora_alpha: float = field(16.0, 'Adapters are scaled by lora_alpha / lora_rank.', above=0, when={'lora_rank': ON})
  lora_matrices: str = field(
    'wq,wv',
    "Patterns of the matrices with adapters, by the ends of their names: 'wq,moe/w?', 'decoder/*/w?'; all: '*'.",
    when={'lora_rank': ON},
  )
  clip_norm: float = field(0.0, 'Largest global norm of the gradients; 0: no limit.', at_least=0)
  max_steps: int | None = changeable(
    100_000,
    f'Step at which training ends{_CHOSEN}so many that training reads {run_length.POSITIONS:,} * sqrt(n) positions, '
    f'where an epoch has n. The schedules {", ".join(ThatRead(SCHEDULES, "max_steps"))} end there: with another '
    'max_steps, a run that goes on has other rates from then on, and says both.',
    at_least=0,
    settled=True,
    open=(None,),
  )
  log_every: int = changeable(
    1,
    'Steps between lines of train.jsonl and of the event file; a checkpoint between has a line of totals in the first.',
    at_least=1,
  )
  eval_every: int | None = changeable(
    1000,
    f'Steps between evaluations of dev cross-entropy, each of which also saves{_CHOSEN}a twentieth of max_steps.',
    at_least=1,
    settled=True,
    open=(None,),
  )
  save_every: int = changeable(0, 'Steps between checkpoints; 0: only when evaluating.', at_least=0)
  keep_checkpoints: int = changeable(3, 'Newest checkpoints that are kept, in addition to the best.', at_least=1)
  keep_every: int = changeable(
    0, 'Checkpoints of steps that are multiples of keep_every are kept forever; 0: none.', at_least=0
  )
  patience: int = changeable(
    0,
    'Evaluations, every eval_every steps, without a new best checkpoint after which training ends; 0: no limit.',
    at_least=0,
  )
  beam_size: int = changeable(4, 'W, hypotheses of a beam search.', at_least=1, at_most=1024)
  length_norm_alpha: float = changeable(0.8, 'Exponent of the length penalty of beam search.', at_least=0)
  length_norm_k: float = changeable(
    5.0, 'k of the length penalty ((k + length) / (k + 1)) ^ length_norm_alpha.', at_least=0
  )
  early_stopping: str = changeable(
    'exact',
    'When beam search ends: exact, when nothing better can follow; heuristic, when nothing better follows within '
    f'{MARGIN} symbols; first, when as many hypotheses as the beam has ended.',
    choices=EARLY_STOPPING,
  )
  repetition_penalty: float = changeable(
    repetition_lib.OFF[0],
    "Factor of the log-probabilities of symbols that came in an answer before, as transformers'; 1: none. With a beam "
    'of 1 and in samples, logits are multiplied, or divided if positive.',
    at_least=1e-6,
    at_most=repetition_lib.MOST[0],
  )
  no_repeat_ngram_size: int = changeable(
    repetition_lib.OFF[1],
    "Size of n-grams that come once in an answer at most, as transformers'; 0: any may come again.",
    at_least=0,
    at_most=repetition_lib.MOST[1],
  )

  def __post_init__(self):
    super().__post_init__()
    if self.freeze and self.lora_rank:
      fields.refuse(self, 'freeze', 'left out with lora_rank', 'adapters alone are trained')
    if self.freeze or self.lora_rank:
      self._check_trained()

  def _check_trained(self) -> None:
    """Refuses parts and matrices that the model does not have, and a model without a part that is trained."""
    try:
      trained = self.program().trained_specs
    except UserError as e:
      raise UserError(f'{"lora_matrices" if self.lora_rank else "freeze"}: {e}') from None
    if not trained:
      fields.refuse(self, 'freeze', 'less than all of the model', 'leave a part to be trained')

  @property
  def _schedule(self) -> Schedule:
    steps = {'warmup_steps': self.warmup_steps or 1, 'max_steps': self.max_steps or _NO_END}
    return SCHEDULES[self.schedule].of(self, **steps)

  @property
  def _optimizer(self) -> Optimizer:
    return OPTIMIZERS[self.optimizer].of(self)

  @property
  def repetition(self) -> repetition_lib.Repetition | None:
    """Limits on the repetition of symbols in an answer."""
    return repetition_lib.Repetition.of(self.repetition_penalty, self.no_repeat_ngram_size)

  @property
  def moe_gate(self) -> Gate:
    gate = gates.make(self.gate, self)
    if getattr(gate, 'capacity_factor', None) == 'auto':
      gate = dataclasses.replace(gate, capacity_factor=gate.auto_capacity_factor(self.num_experts))
    return gate

  @property
  def slots_factor(self) -> float | None:
    """capacity_factor, or the number in the place of 'auto'."""
    if self.capacity_factor != 'auto':
      return self.capacity_factor
    return self.moe_gate.auto_capacity_factor(self.num_experts) if self.num_experts else 2.0

  @property
  def has_dense_layers(self) -> bool:
    """Whether a layer has a dense feed-forward."""
    return not self.num_experts

  @property
  def causal_experts(self) -> bool:
    """Whether a causal decoder has experts."""
    return bool(self.num_experts)

  def _check_combinations(self) -> None:
    super()._check_combinations()
    if self.num_experts == 1:
      fields.refuse(self, 'num_experts', '2 or more, or 0 for a dense model')
    if self.num_experts:
      self._check_gate()
    if self.capacity_chunks > 1 and self.slots_factor is None:
      fields.refuse(self, 'capacity_chunks', '1 with capacity_factor = None, which takes slots in rounds')
    if self.num_groups % self.micro_batches:
      fields.refuse(self, 'micro_batches', f'a divisor of num_groups={self.num_groups}')

  def _check_gate(self) -> None:
    gate = self.moe_gate
    if gate.experts_choose and self.causal_experts:
      way_out = (
        'an expert that chooses among all tokens of a group sees later ones, which a decoder does not have when it '
        "generates: experts in an encoder alone, or gate='top2'"
      )
      fields.refuse(self, 'gate', 'one by which tokens choose experts, where a causal decoder has experts', way_out)
    if gate.tasks and not hasattr(self, 'gate_tasks'):
      fields.refuse(self, 'gate', 'one that reads tokens', 'by_target and by_pair are for models of translation')
    if gate.tasks and self.capacity_factor not in ('auto', None):
      way_out = 'the tokens of a sentence all queue for the same experts: leave it out'
      fields.refuse(self, 'capacity_factor', f"'auto' or None with gate={self.gate!r}", way_out)
    gate.check(self.num_experts)

  def make(self, part: type[_Part], **values: Any) -> _Part:
    """A part such as a layer; fields that are not in `values` are those of the configuration with the same name."""
    names = {field.name for field in dataclasses.fields(self)} - values.keys()
    return part(**{f.name: getattr(self, f.name) for f in dataclasses.fields(part) if f.name in names}, **values)

  def moe(self) -> MoE | None:
    """The feed-forward of the layers with experts; None for a dense model."""
    if not self.num_experts:
      return None
    return self.make(
      MoE,
      hidden_dim=self.expert_dim or self.ff_dim,
      num_groups=self.num_groups // self.micro_batches,  # of what it is given at once
      gate=self.moe_gate,
      capacity_factor=self.slots_factor,
      output_masking=self.expert_output_masking,
    )

  def __init_subclass__(cls, **more):
    """Takes `task()`, the name of `model()` until 0.1, of a params class of a user; it goes with the next release."""
    super().__init_subclass__(**more)
    class_values = vars(cls)
    if 'task' in class_values and 'model' not in class_values:
      warnings.warn(f'{cls.__name__}.task() is now called model(): rename it', FutureWarning, stacklevel=2)
      cls.model = class_values['task']
    if 'model' in class_values:
      cls.task = class_values['model']

  def for_inference(self, groups: int = 1, row_tokens: int = 0, batch_tokens: int = 0) -> Self:
    """Configuration for decoding and evaluation, whose results do not depend on the number of groups.

    Args:
      groups: one for each device that holds rows of a batch.
      row_tokens: tokens of the longest row, of which a batch has one for each group at least.
      batch_tokens: tokens of a batch; 0: as configured for evaluation.
    """
    tokens = max(batch_tokens or self.eval_batch_tokens or self.batch_tokens, row_tokens * groups)
    return dataclasses.replace(
      self, num_groups=groups, micro_batches=1, batch_tokens=max(tokens, self.batch_tokens), eval_batch_tokens=tokens
    )

  def model(self) -> Any:
    """The model that these values describe; see program.Model."""
    raise NotImplementedError(f'{type(self).__name__} has no model()')

  def program(self) -> Program:
    names = lambda listed: tuple(name.strip() for name in listed.split(',') if name.strip())
    return self.make(
      Program,
      model=self.model(),
      optimizer=WithMovingAverage(self._optimizer, self.average_decay) if self.average_decay else self._optimizer,
      schedule=self._schedule,
      frozen=names(self.freeze),
      lora=Lora(self.lora_rank, self.lora_alpha, names(self.lora_matrices)) if self.lora_rank else None,
    )
