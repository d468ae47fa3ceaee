"""Gates by name: the options that each takes, and a gate of one's own, which is a class and a line."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf
import tiny_config

from lingvo_moe.addons.export import pruning
from lingvo_moe.config import fields
from lingvo_moe.config.fields import field
from lingvo_moe.core import prng, weights
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates import gate as gating
from lingvo_moe.layers.gates import table
from lingvo_moe.layers.gates.by_task import ByPair, ByTarget
from lingvo_moe.layers.gates.expert_choice import ExpertChoice
from lingvo_moe.layers.gates.hierarchical import Hierarchical
from lingvo_moe.layers.gates.noisy_top_k import NoisyTopK
from lingvo_moe.layers.gates.soft_mixture import SoftMixture
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.gates.top_k import Switch, TopK, TopKUnnormalised
from lingvo_moe.models import sizes
from lingvo_moe.tasks import metrics
from lingvo_moe.tasks.mt.mt_task import TranslationTask

OPTIONS = types.SimpleNamespace(
  choices=3, second_choice='always', gate_init_scale=0.1, capacity_factor=1.5, groups_of_experts=4, dispatch='gather'
)
LINEAR = dict(gate_init_scale=0.1, groups_of_experts=4)

# A gate made of the options; experts that a token visits of 8; whether the number of choices is free; and of how few
# experts it can choose, where experts may be left out. The one list of all gates that a test has.
GATES = {
  'top2': (Top2('always', gate_init_scale=0.1), 2, False, 2),
  'top_k': (TopK(3, **LINEAR), 3, True, 3),
  'top_k_unnormalised': (TopKUnnormalised(3, **LINEAR), 3, True, 3),
  'switch': (Switch(**LINEAR), 1, False, 2),
  'noisy_top_k': (NoisyTopK(3), 3, True, 4),
  'hierarchical': (Hierarchical(4, 3, 'gather'), 9, True, None),
  'expert_choice': (ExpertChoice(1.5, gate_init_scale=0.1), 1.5, False, None),
  'soft': (SoftMixture(gate_init_scale=0.1), 8, False, None),
  'by_target': (ByTarget(3, **LINEAR), 3, True, 3),
  'by_pair': (ByPair(3, **LINEAR), 3, True, 3),
}


@pytest.mark.parametrize('name', table.GATES)
def test_a_gate_takes_of_the_options_what_it_needs(name):
  gate, experts_per_token, has_choices, least_experts = GATES[name]
  assert table.make(name, OPTIONS) == gate
  assert gate.experts_per_token(num_experts=8) == experts_per_token
  assert (name in table.ThatHave('choices')) == has_choices
  assert gate.least_experts == least_experts


def test_names_of_gates_that_have_a_field_are_in_the_order_of_the_table():
  assert [*table.ThatHave('choices')] == [name for name in table.GATES if GATES[name][2]]


def test_a_token_visits_no_more_experts_than_there_are():
  assert ExpertChoice(3.0).experts_per_token(num_experts=2) == 2


@pytest.mark.parametrize(
  ('values', 'factor'),
  [
    ({'gate': 'top2'}, 2.0),
    ({'gate': 'switch'}, 2.0),
    ({'gate': 'top_k', 'choices': 8}, 8.0),
    ({'gate': 'top_k_unnormalised', 'choices': 3}, 3.0),
    ({'gate': 'noisy_top_k', 'choices': 4}, 4.0),
    ({'gate': 'hierarchical', 'choices': 3, 'groups_of_experts': 4}, 9.0),
    ({'gate': 'soft'}, 2.0),
    ({'num_experts': 0, 'gate': 'top_k', 'choices': 8}, 2.0),
    ({'gate': 'top_k', 'choices': 8, 'capacity_factor': 1.5}, 1.5),
    ({'gate': 'top_k', 'choices': 8, 'capacity_factor': None}, None),
  ],
)
def test_auto_capacity_has_a_slot_for_every_choice_of_a_token_and_at_least_two(values, factor):
  config = tiny_config.make(**{'num_experts': 16} | values)
  assert config.slots_factor == fields.with_choices(config).capacity_factor == factor
  assert not config.num_experts or config.moe().capacity_factor == factor


def test_auto_capacity_keeps_most_of_eight_choices_where_a_factor_of_two_drops_them():
  x_BTM = tf.random.stateless_normal([8, 16, 8], seed=[1, 2])
  dropped = {}
  for factor in ('auto', 2.0):
    config = tiny_config.make(gate='top_k', num_experts=16, choices=8, model_dim=8, capacity_factor=factor)
    layer = config.moe()
    stats = layer(weights.initialize(layer.weights(), seed=3), x_BTM, tf.zeros([8, 16]), prng.key(4, 'step'))[1].stats
    dropped[factor] = metrics.dropped_share({'routing': {'layer': stats}})
  assert dropped['auto'] < 0.2 < 0.7 < dropped[2.0]


def test_auto_capacity_of_expert_choice_is_two_visits_of_a_token():
  config = tiny_config.make(gate='expert_choice', num_experts=16, experts_in='encoder')
  assert (config.slots_factor, config.moe_gate.capacity_factor) == (2.0, 2.0)


def test_expert_choice_needs_a_capacity_factor():
  with pytest.raises(UserError, match="capacity_factor must be a number with gate='expert_choice'.*; saw None"):
    ExpertChoice(None).check(4)


@dataclasses.dataclass(frozen=True)
class Nearest(gating.LinearGate):
  """Sends a token to its likeliest expert, at a temperature."""

  temperature: float = 1.0
  least_experts = 3

  def check(self, num_experts):
    if self.temperature > num_experts:
      fields.refuse(self, 'temperature', f'at most num_experts={num_experts}', 'cool it')

  def experts_per_token(self, num_experts):
    return 1

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None):
    logits_GSE = gating.gate_logits(theta['gate'], x_GSM) / self.temperature
    expert_GS1, real_GS1 = gating.top_choices(logits_GSE, 1), gating.real_tokens(paddings_GS)[..., tf.newaxis]
    gates_GSE = tf.nn.softmax(logits_GSE)
    stats = gating.statistics(logits_GSE, gates_GSE, real_GS1[..., 0])
    weight_GS1 = gating.at_choices(gates_GSE, expert_GS1)
    margin_GS = gating.margin(gates_GSE, expert_GS1)
    return gating.route(expert_GS1, weight_GS1, real_GS1, gates_GSE.shape[-1], capacity, stats, margin_GS)


@pytest.fixture
def nearest(monkeypatch):
  """Function that makes a tiny model with the gate above, whose option is a field of the model."""
  monkeypatch.setitem(table.GATES, 'nearest', Nearest)  # the line
  base = type(tiny_config.make())
  spec = field(2.0, 'Divides the logits of the gate.', above=0)
  model = dataclasses.make_dataclass('Model', [('temperature', float, spec)], bases=(base,), frozen=True)
  sizes_of = dataclasses.asdict(tiny_config.make(num_experts=4, activation_dtype='bfloat16'))
  return lambda **changes: model(**{**sizes_of, 'gate': 'nearest', **changes})


def test_a_model_learns_with_a_gate_of_ones_own(nearest):
  config = nearest()
  assert config.moe_gate == Nearest(2.0)
  program = config.program()
  batch = {name: tf.constant(ids) for name, ids in TranslationTask(config).random_batch().items()}
  begin = program.init()
  state, metrics = program.train_step(begin, batch)
  assert np.isfinite(metrics['loss'])
  gates = [name for name in begin['weights'] if name.endswith('/gate')]
  assert len(gates) == 2 and all(np.any(state['weights'][n] != begin['weights'][n]) for n in gates)
  specs = program.weight_specs
  assert all(specs[name].float32 and sizes.part_of(name, specs[name]).endswith('/gates') for name in gates)
  one, two = (sizes.count_per_token(specs, count) for count in (config.moe_gate.experts_per_token(4), 2))
  assert one < two


def test_a_gate_of_ones_own_refuses_in_words(nearest):
  with pytest.raises(UserError, match='temperature must be at most num_experts=4; saw 5.0: cool it'):
    nearest(temperature=5.0)
  with pytest.raises(
    UserError, match="groups_of_experts must be left out with gate='nearest'.*saw 2: it is for gate=to"
  ):
    fields.check_effects(nearest(groups_of_experts=2), ['groups_of_experts'])
  with pytest.raises(UserError, match='gate must be one of top2, .*, nearest; saw .furthest'):
    nearest(gate='furthest')


def test_a_gate_of_ones_own_says_whether_it_can_be_pruned(nearest, monkeypatch):
  config = nearest()
  smaller = config.with_share_of_experts(0.75)
  weights = {name: np.zeros(spec.shape) for name, spec in config.program().weight_specs.items()}
  layers = {name.rpartition('/moe/')[0] for name in weights if '/moe/' in name}
  kept = dict.fromkeys(layers, pruning.KeptExperts([0, 2, 3], 1.0))
  pruned = pruning.without_others(weights, config.program().weight_specs, kept)
  assert {n: w.shape for n, w in pruned.items()} == {n: s.shape for n, s in smaller.program().weight_specs.items()}
  with pytest.raises(UserError, match="gate='nearest' chooses among 3 experts or more; saw 2"):
    config.with_share_of_experts(0.5)
  monkeypatch.setattr(Nearest, 'least_experts', None)
  with pytest.raises(UserError, match="with the gates top2, top_k, .*; this model has gate='nearest'"):
    config.with_share_of_experts(0.75)
