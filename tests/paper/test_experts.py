"""The page on what experts have learnt: tables by hand, and the tool as typed."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip('matplotlib')
pytest.importorskip('scipy')

from lingvo_moe.analysis.specialization import LayerChoices
from lingvo_moe.core.errors import UserError
from lingvo_moe.paper import experts
from lingvo_moe.report import reading

TOOL = pathlib.Path(__file__).resolve().parent.parent.parent / 'tools' / 'expert_specialization.py'
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
  spans = [span(1, [4, 2, 0, 2]), span(2, [8, 0, 0, 0]), span(3, [0, 0, 9, 0])]
  (tmp_path / 'routing.jsonl').write_text('\n'.join(spans) + '\n')
  record = reading.read(str(tmp_path), 'dev')
  [about, table] = experts.load_in_training(record, 2)
  assert about.endswith('over steps 1 to 2.')
  assert table.splitlines()[-1] == '| encoder/layer_01 | 3.00 | 1 of 4 | 1.00% | 20.00% | 25.00% |'
  assert experts.load_in_training(record, 0) == [f'{tmp_path.name} has no loads of its experts up to step 0.']


def by_language(chosen):
  """A token for each expert that a language chooses."""
  languages = np.repeat(np.arange(len(chosen)), [len(of) for of in chosen])
  one = np.concatenate(chosen)[:, np.newaxis]
  return LayerChoices(one, np.ones(one.shape), languages, np.arange(len(one)))


def test_neighbours_and_plot_of_three_languages(tmp_path):
  choices = {
    'encoder/layer_01': by_language([[0, 1, 2, 3]] * 3),
    'decoder/layer_01': by_language([[0, 0, 1], [0, 1, 1], [2, 3, 3]]),
  }
  found = experts.Specialization(choices, ['de', 'nl', 'ru'], 4, ABOUT)
  [_, table] = found.neighbours()
  assert table.splitlines()[0] == '| layer | same script |'
  assert '| decoder/layer_01 | 100% (50%) |' in table
  [about, table] = found.information()
  assert 'log 4 = 1.39' in about and '| decoder/layer_01 | 9 | ' in table
  assert found.plot(str(tmp_path)) == ['![experts](experts.png)']
  assert (tmp_path / 'experts.png').stat().st_size > 5000
  assert experts.Specialization(choices, ['de', 'nl', 'ru'], 4, {}).neighbours() == []
  with pytest.raises(UserError, match='no token was routed'):
    experts.Specialization({}, [], 4, {})
  with pytest.raises(UserError, match="'decoder/layer_02'; closest: .*decoder/layer_01"):
    found.plot(str(tmp_path), 'decoder/layer_02')


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
  command = [sys.executable, TOOL, toy_run.path, f'--out={tmp_path / "out"}', f'--data_dir={tmp_path / "held_out"}']
  done = subprocess.run([*command, f'--labels={labels}', '--max_sentences=5'], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'out' / 'experts.md').read_text() == done.stdout
  assert 'mine has no loads of its experts' in done.stdout and '| decoder/layer_00 |' in done.stdout
  assert 'same script' in done.stdout and (tmp_path / 'out' / 'experts.png').exists()
  done = subprocess.run([*command, f'--labels={tmp_path / "none.tsv"}'], capture_output=True, text=True)
  assert done.returncode == 1 and done.stderr.count('\n') == 1 and 'none.tsv' in done.stderr
