"""Exports choose experts as their run does: by scores, biases and groups of experts."""

import pytest
import tensorflow as tf
import toy_run
import untrained_run

import lingvo_moe
from lingvo_moe.cli.commands import export

LINES = [source for source, _ in toy_run.sentences()][:12]
GATE = {'gate': 'top_k', 'router_score': 'sigmoid', 'router_bias_update_rate': 0.01}
GROUPS = {'num_experts': 6, 'groups_of_experts': 3, 'chosen_groups': 2, 'experts_in': 'decoder'}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of random weights and biases, and the translations of the lines."""
  folder = tmp_path_factory.mktemp('run')
  toy_run.write_corpus(folder / 'corpus')
  run = untrained_run.begin(folder, folder / 'corpus', {}, **GATE, **GROUPS)
  state = untrained_run.state_of(run.load()[1], 1, seed=1)
  for name, weight in state.state['weights'].items():
    if name.endswith('gate_bias'):
      state.state['weights'][name] = 0.3 * tf.random.stateless_normal(weight.shape, [0, 3])
  run.checkpoints().save(state)
  expected = [best for [best] in lingvo_moe.load(run.path).translate(LINES, scores=True, n_best=1)]
  assert len({round(hypothesis.score, 4) for hypothesis in expected}) == len(LINES)
  return run.path, expected


def test_an_export_for_the_engine_translates_as_its_run(run, tmp_path):
  path, expected = run
  export.export(export.Options(path, out=str(tmp_path / 'out'), format='litert', weights='float32'))
  found = [best for [best] in lingvo_moe.load(str(tmp_path / 'out')).translate(LINES, scores=True, n_best=1)]
  assert [h.text for h in found] == [h.text for h in expected]
  assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=2e-5)


def test_a_saved_model_translates_as_its_run(run, tmp_path):
  path, expected = run
  export.export(export.Options(path, out=str(tmp_path / 'out')))
  signature = tf.saved_model.load(str(tmp_path / 'out')).signatures['serving_default']
  texts = signature(lines=tf.constant(LINES))['text'].numpy()
  assert [text.decode() for text in texts] == [h.text for h in expected]
