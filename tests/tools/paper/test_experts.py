"""The page on what experts have learnt: tables by hand, and the tool as typed."""

import json
import pathlib

import forks
import numpy as np
import pytest

pytest.importorskip('matplotlib')
pytest.importorskip('scipy')

from lingvo_moe.addons.report import reading
from lingvo_moe.core.errors import UserError
from paper import experts
from paper.specialization import LayerChoices

TOOL = pathlib.Path(__file__).resolve().parents[3] / 'tools' / 'expert_specialization.py'
ABOUT = {'de': {'name': 'German', 'script': 'Latin'}, 'nl': {'script': 'Latin'}, 'ru': {'script': 'Cyrillic'}}


def test_loads_of_an_epoch_are_sums_over_its_steps(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps({'model': 'mt.cldr.Tiny', 'values': {'num_experts': 4}}))
  line = lambda step, first, second: json.dumps(
    {
      'step': step,
      'loss': 1.0,
      'moe/encoder/layer_01/first_dropped': first,
      'moe/encoder/layer_01/second_dropped': second,
      'moe/encoder/layer_01/second_skipped': 0.25,
    }
  )
  (tmp_path / 'train.jsonl').write_text('\n'.join([line(1, 0.0, 0.1), line(2, 0.02, 0.3), line(3, 1.0, 1.0)]) + '\n')
  span = lambda step, choices: json.dumps({'step': step, 'steps': 1, 'choices': {'encoder/layer_01': choices}})
  spans = [span(1, [2, 2, 0, 4]), span(2, [0, 0, 0, 8]), span(3, [0, 0, 9, 0])]
  (tmp_path / 'routing.jsonl').write_text('\n'.join(spans) + '\n')
  record = reading.read([str(tmp_path)], 'dev')[0]
  [about, table] = experts.load_in_training(record, 2)
  assert about.endswith(', of 2 of the first 2 steps.')
  assert table.splitlines()[-1] == '| encoder/layer_01 | 3.00 | 1 of 4 | 1.00% | 20.00% | 25.00% |'
  assert experts.load_in_training(record, 0) == [f'{tmp_path.name} has no loads of its experts up to step 0.']


def by_language(chosen):
  """A token for each expert that a language chooses."""
  languages = np.repeat(np.arange(len(chosen)), [len(of) for of in chosen])
  one = np.concatenate(chosen).astype(int)[:, np.newaxis]
  return LayerChoices(one, np.ones(one.shape), languages, np.arange(len(one)))


def test_neighbours_and_plot_of_three_languages(tmp_path):
  choices = {
    'encoder/layer_01': by_language([[0, 1, 2, 3]] * 3),
    'decoder/layer_01': by_language([[0, 0, 1], [0, 1, 1], [2, 3, 3]]),
  }
  found = experts.Specialization(choices, ['de', 'nl', 'ru'], 4, ABOUT)
  [_, table] = found.neighbours()
  assert table.splitlines()[0] == '| layer | same script |'
  assert '| decoder/layer_01 | 100% (50%) of 2 |' in table
  [about, table] = found.information()
  assert 'log 4 = 1.39' in about and '| decoder/layer_01 | 9 | ' in table
  assert found.plot(str(tmp_path)) == ['![experts](experts.png)']
  assert (tmp_path / 'experts.png').stat().st_size > 5000
  assert experts.Specialization(choices, ['de', 'nl', 'ru'], 4, {}).neighbours() == []
  with pytest.raises(UserError, match='no token was routed'):
    experts.Specialization({}, [], 4, {})
  with pytest.raises(UserError, match="'decoder/layer_02'; closest: .*decoder/layer_01"):
    found.plot(str(tmp_path), 'decoder/layer_02')
  with pytest.raises(UserError, match="the labels are script; saw 'scrip'; closest: script"):
    found.neighbours('scrip')


def test_labels_and_layers_are_checked_before_text_is_routed(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps({'model': 'mt.cldr.Tiny', 'values': {'num_experts': 4}}))
  (tmp_path / 'train.jsonl').write_text('')
  nothing = reading.read([str(tmp_path)], 'dev')[0]
  experts.check_choices(nothing, ABOUT, 'script', 'decoder/layer_07')  # no log is there: the layer is seen later
  (tmp_path / 'routing.jsonl').write_text('{"step": 1, "steps": 1, "choices": {"encoder/layer_01": [1, 3]}}\n')
  record = reading.read([str(tmp_path)], 'dev')[0]
  experts.check_choices(record, ABOUT, None, None)
  experts.check_choices(record, ABOUT, 'script', 'encoder/layer_01')
  with pytest.raises(UserError, match="are encoder/layer_01; saw 'encoder/layer_1'; closest: encoder/layer_01"):
    experts.check_choices(record, ABOUT, None, 'encoder/layer_1')
  for about, known in ((ABOUT, 'script'), ({}, 'not given')):
    with pytest.raises(UserError, match=f"the labels are {known}; saw 'name'"):
      experts.check_choices(record, about, 'name', None)


def test_information_is_in_its_columns():
  """Language tells all of the expert; a token, which is in all of them, nothing."""
  languages, pieces = np.repeat(np.arange(4), 1000), np.tile(np.arange(4), 1000)
  one = languages[:, np.newaxis]
  layer = LayerChoices(one, np.ones(one.shape), languages, pieces)
  [_, table] = experts.Specialization({'decoder/layer_01': layer}, list('abcd'), 4, {}).information()
  assert table.splitlines()[0].endswith('| I(expert; language) | I(expert; token) |')
  told, by_token = table.splitlines()[-1].split(' | ')[3:]
  assert told == '1.39 (100%)' and abs(float(by_token.split()[0])) < 0.05


def test_languages_without_tokens_or_labels_are_no_neighbours(tmp_path, monkeypatch):
  languages = ['de', 'nl', 'ru', 'bg', 'la', 'tlh', 'qya']
  about = {**ABOUT, 'bg': {'script': 'Cyrillic'}, 'la': {'script': 'Latin'}, 'tlh': {'name': 'K'}, 'qya': {'name': 'Q'}}
  choices = by_language([[0, 0, 1], [0, 1, 1], [2, 3, 3], [2, 3], [], [1, 3], [1, 3]])
  found = experts.Specialization({'decoder/layer_01': choices}, languages, 4, about)
  [_, table] = found.neighbours()
  # Each of four has one of five others of its script; the two without a label choose alike, which counts for nothing.
  assert '| decoder/layer_01 | 100% (20%) of 4 |' in table
  drawn = []
  monkeypatch.setattr(experts.plots, 'heat_map', lambda axes, *args: drawn.append(args))
  found.plot(str(tmp_path))
  [(values, labels, *_)] = drawn
  np.testing.assert_allclose(values[labels.index('la · Latin')], 25)
  nobody = experts.Specialization({'decoder/layer_01': by_language([[0], [], [1]])}, languages[:3], 4, about)
  assert nobody.neighbours() == []


def test_the_plot_has_languages_and_experts_side_by_side_that_are_alike(tmp_path, monkeypatch):
  """Expert 2 is dead; language tells of the second layer's experts alone."""
  drawn = []
  monkeypatch.setattr(experts.plots, 'heat_map', lambda axes, *args: drawn.append(args))
  choices = {
    'encoder/layer_01': by_language([[0, 1, 3]] * 4),
    'decoder/layer_01': by_language([[0] * 9 + [3], [1] * 10, [0] * 8 + [3] * 2, [1] * 9 + [3]]),
  }
  found = experts.Specialization(choices, ['de', 'ru', 'nl', 'bg'], 4, {**ABOUT, 'bg': {'script': 'Cyrillic'}})
  found.plot(str(tmp_path))
  [(values, labels, groups, columns, _)] = drawn
  own = {'German · Latin': [90, 0, 0, 10], 'nl · Latin': [80, 0, 0, 20], 'ru · Cyrillic': [0, 100, 0, 0]}
  own['bg · Cyrillic'] = [0, 90, 0, 10]
  assert sorted(labels) == sorted(own) and sorted(columns) == ['0', '1', '2', '3']
  assert groups in (['Latin'] * 2 + ['Cyrillic'] * 2, ['Cyrillic'] * 2 + ['Latin'] * 2)  # similar ones side by side
  for row, label in zip(values, labels):
    np.testing.assert_allclose(row, [own[label][int(column)] for column in columns])
  assert abs(columns.index('0') - columns.index('1')) > 1  # they serve different languages


def test_a_table_of_labels_is_read_by_the_names_of_its_columns(tmp_path):
  path = tmp_path / 'labels.tsv'
  path.write_text("language\tname\tscript\nquc\tK'iche'\tLatin\nrus\t\tCyrillic\n")
  assert experts.read_labels(str(path)) == {
    'quc': {'name': "K'iche'", 'script': 'Latin'},
    'rus': {'script': 'Cyrillic'},
  }
  path.write_text('quc\tLatin\n')
  with pytest.raises(UserError, match='one of them language'):
    experts.read_labels(str(path))
  path.write_bytes(b'language\tscript\rquc\tLatin\r')
  with pytest.raises(UserError, match='CR alone: convert it'):
    experts.read_labels(str(path))
  path.write_bytes(b'language\tscript\nk\xff\tLatin\n')
  with pytest.raises(UserError, match='UTF-8'):
    experts.read_labels(str(path))


def test_the_tool_as_typed(toy_run, tmp_path):
  corpus = pathlib.Path(toy_run.path).parent.parent / 'corpus' / 'de-en'
  source, target = ((corpus / f'dev.{side}').read_text() for side in ('de', 'en'))
  for language in ABOUT:
    folder = tmp_path / 'held_out' / f'{language}-en'
    folder.mkdir(parents=True)
    (folder / f'dev.{language}').write_text(source)
    (folder / 'dev.en').write_text(target)
  labels = tmp_path / 'labels.tsv'
  labels.write_text('language\tname\tscript\nde\tGerman\tLatin\nnl\tDutch\tLatin\nru\tRussian\tCyrillic\n')
  command = [TOOL, toy_run.path, f'--out={tmp_path / "out"}', f'--data_dir={tmp_path / "held_out"}']
  done = forks.run([*command, f'--labels={labels}', '--max_sentences=5'])
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'out' / 'experts.md').read_text() == done.stdout
  assert 'mine has no loads of its experts' in done.stdout and '| decoder/layer_00 |' in done.stdout
  assert 'same script' in done.stdout and (tmp_path / 'out' / 'experts.png').exists()
  done = forks.run([*command, f'--labels={tmp_path / "none.tsv"}'])
  assert done.returncode == 1 and done.stderr.count('\n') == 1 and 'none.tsv' in done.stderr
