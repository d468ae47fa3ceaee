"""lingvo-moe tokenize --model=mt.m4mini.MoE8E --data_dir=CORPUS --cache_dir=CACHE --set source_vocab=A.model \\
    --set target_vocab=B.model

Tokenises a corpus before training. Type the same command in any number of processes, on machines that share the cache
folder or reach it in a bucket: each makes the parts that no other has claimed, and ends when all are made. Training
with this --cache_dir, corpus and vocabularies then begins at once.

--logdir=RUN in place of --model takes the corpus, vocabularies and cache of a run. Without vocabularies each process
trains those that the trainer would make.
"""

import tempfile
import time

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.cli.commands import values
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files
from lingvo_moe.tasks.task import Feed, task_of

_MODEL = flags.DEFINE_string('model', None, "A registered model's name.")
_LOGDIR = flags.DEFINE_string('logdir', None, 'Log directory of a run; in place of --model.')
_DATA_DIR = flags.DEFINE_string('data_dir', None, "Folder of the corpus; default: the configuration's.")
_CACHE_DIR = flags.DEFINE_string('cache_dir', None, 'Folder for tokenised text; default: <logdir>/cache.')
_BINDINGS = values.define('source_vocab=A.model')


@app.command()
def main():
  from lingvo_moe.run.rundir import RunDir

  if (_MODEL.value is None) == (_LOGDIR.value is None) or not (_LOGDIR.value or _CACHE_DIR.value):
    raise UserError('--model with --cache_dir, or --logdir, says what to tokenise; give one of them')
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    if _LOGDIR.value:
      run = RunDir(_LOGDIR.value)
      (_, config), cache_dir = run.load(), _CACHE_DIR.value or run.cache_dir
    else:
      data_dir = {'data_dir': files.absolute(_DATA_DIR.value)} if _DATA_DIR.value else {}
      config = configuration.resolve(_MODEL.value, [], _BINDINGS(_MODEL.value), **data_dir)
      task_of(config).check_corpus()
      config, cache_dir = task_of(config).prepare(folder, resumed=False), _CACHE_DIR.value
    task, feed = task_of(config), Feed()
    train, dev = task.train_input(cache_dir, feed), task.dev_input(cache_dir, feed)
  print(f'train: {train.stats}\ndev: {dev.stats}\ntokenised in {cache_dir}, {time.monotonic() - start:.0f} s')


if __name__ == '__main__':
  main()
