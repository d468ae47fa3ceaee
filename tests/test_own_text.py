"""The walk of docs/adapt.md from public models: every command works as written, on tiny ones and in a few steps."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from imported_model import FIXTURES

PAGE = pathlib.Path(__file__).resolve().parent.parent / 'docs' / 'adapt.md'
SMALLER = {'--max_steps=2000': '--max_steps=2', 'lora_rank=8': 'lora_rank=4', 'batch_tokens=4096': 'batch_tokens=512'}
SMALLER |= {'--hub=Helsinki-NLP/opus-mt-de-en': 'opus-mt-de-en'}
LINES = ['Wo ist der Bahnhof?', 'Ein Hund läuft.', 'Er trinkt jeden Morgen Kaffee.']


@pytest.mark.slow
@pytest.mark.parametrize(
  'fixture, folder, pair',
  [('marian', 'opus-mt-de-en', 'eng-deu'), ('nllb', 'nllb-200-distilled-600M', 'gsw_Latn-eng_Latn')],
)
def test_the_commands_from_a_public_model_work(fixture, folder, pair, tmp_path):
  (section,) = re.findall(
    r'^## Start from a public model\n(.*?)^## ', PAGE.read_text('utf-8'), re.DOTALL | re.MULTILINE
  )
  blocks = re.findall(r'```sh\n(.*?)```', section, re.DOTALL)
  lines = '\n'.join(block for block in blocks if ('runs/nllb' in block) == (fixture == 'nllb')).replace('\\\n', ' ')
  shutil.copytree(FIXTURES / fixture, tmp_path / folder)
  (tmp_path / 'DATA' / pair).mkdir(parents=True)
  for split, language in ((split, language) for split in ('train', 'dev', 'test') for language in pair.split('-')):
    (tmp_path / 'DATA' / pair / f'{split}.{language}').write_text('\n'.join([*LINES * 20, '']), encoding='utf-8')
  run = 0
  for line in filter(None, lines.splitlines()):
    for written, smaller in SMALLER.items():
      line = line.replace(written, smaller)
    line = line.replace('lingvo-moe', f'{shlex.quote(sys.executable)} -m lingvo_moe.cli.commands.main')
    done = subprocess.run(['bash', '-c', line], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f'{line}\n{done.stderr[-3000:]}'
    run += 1
  assert run == {'marian': 9, 'nllb': 4}[fixture]
  if fixture == 'marian':
    assert (tmp_path / 'lora' / 'README.md').exists() and (tmp_path / 'int8' / 'manifest.json').exists()
  else:
    assert '<2gsw_Latn>' in (tmp_path / 'gsw' / 'tokenizer_config.json').read_text()
