"""Command lingvo-moe tokenize: processes that share a folder, whose cache a trainer then opens as it is."""

import concurrent.futures
import pathlib

import forks

from lingvo_moe.inputs import token_cache
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.tasks.task import task_of


def test_processes_tokenise_a_corpus_once_and_training_opens_it(toy_run, tmp_path, monkeypatch):
  config = toy_run.load()[1]
  words = ['-m', 'lingvo_moe.cli.commands.tokenize', '--model=mt.cldr.Tiny', f'--data_dir={config.data_dir}']
  words += [f'--set={name}={getattr(config, name)}' for name in ('source_vocab', 'target_vocab', 'max_length')]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    done = list(pool.map(lambda _: forks.run([*words, f'--cache_dir={tmp_path}']), range(2)))
  assert [process.returncode for process in done] == [0, 0], done[0].stderr
  assert f'train: {task_of(config).train_input(str(tmp_path), Feed(quiet=True)).stats}\n' in done[0].stdout
  made = sorted(path.name for path in pathlib.Path(tmp_path).glob('*/*'))
  assert made.count('meta.json') == 8 and not [name for name in made if name.endswith(('.claim', '.partial'))]
  monkeypatch.setattr(token_cache, '_make', lambda *_: 1 / 0)
  for part in (task_of(config).train_input, task_of(config).dev_input):
    part(str(tmp_path), Feed())
  again = forks.run(['-m', 'lingvo_moe.cli.commands.tokenize', f'--logdir={toy_run.path}', f'--cache_dir={tmp_path}'])
  assert again.returncode == 0, again.stderr
  refused = forks.run(['-m', 'lingvo_moe.cli.commands.tokenize', '--model=mt.cldr.Tiny'])
  assert refused.returncode == 1 and 'error: --model with --cache_dir, or --logdir, says what to' in refused.stderr
