"""Exports choose experts as their run does: by scores, biases and groups of experts."""

import pytest
import tensorflow as tf
import toy_run
import untrained_run

import lingvo_moe
from lingvo_moe.cli.commands import export

LINES = [source for source, _ in toy_run.sentences()][:12]
GATES = {
  'loss-free': {'router_score': 'sigmoid', 'router_bias_update_rate': 0.01},
  'of groups': {'router_score': 'sigmoid', 'groups_of_experts': 4, 'chosen_groups': 2},
}


@pytest.fixture(scope='module', params=GATES)
def run(request, tmp_path_factory):
  """A run of random weights, whose biases are far from zero."""
  folder = tmp_path_factory.mktemp('run')
  toy_run.write_corpus(folder / 'corpus')
  run = untrained_run.begin(folder, folder / 'corpus', {}, gate='top_k', num_experts=8, **GATES[request.param])
  state = untrained_run.state_of(run.load()[1], 1, seed=1)
  for name, weight in state.state['weights'].items():
    if name.endswith('gate_bias'):
      state.state['weights'][name] = tf.random.stateless_normal(weight.shape, [0, 3])
  run.checkpoints().save(state)
  return run


def test_exports_translate_as_their_run(run, tmp_path):
  expected = lingvo_moe.load(run.path).translate(LINES, scores=True, n_best=1)
  texts = [hypothesis.text for [hypothesis] in expected]
  assert len({round(hypothesis.score, 4) for [hypothesis] in expected}) == len(LINES)
  export.export(export.Options(run.path, out=str(tmp_path / 'litert'), format='litert', weights='float32'))
  found = lingvo_moe.load(str(tmp_path / 'litert')).translate(LINES, scores=True, n_best=1)
  assert [hypothesis.text for [hypothesis] in found] == texts
  assert [h.score for [h] in found] == pytest.approx([h.score for [h] in expected], abs=2e-5)
  export.export(export.Options(run.path, out=str(tmp_path / 'saved')))
  signature = tf.saved_model.load(str(tmp_path / 'saved')).signatures['serving_default']
  assert [text.decode() for text in signature(lines=tf.constant(LINES))['text'].numpy()] == texts
