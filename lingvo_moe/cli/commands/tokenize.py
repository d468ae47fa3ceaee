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

from lingvo_moe.cli import app
from lingvo_moe.cli.model_flags import ValueOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.storage import files
from lingvo_moe.tasks.task import task_of


class Options(ValueOptions):
  """Options of the command."""

  model: str | None = flag(None, "A registered model's name.")
  logdir: str | None = flag(None, 'Log directory of a run; in place of --model.')
  data_dir: str | None = flag(None, "Folder of the corpus; default: the configuration's.")
  cache_dir: str | None = flag(None, 'Folder for tokenised text; default: <logdir>/cache.')


@app.command(Options)
def main(options: Options) -> None:
  from lingvo_moe.run.rundir import RunDir

  if (options.model is None) == (options.logdir is None) or not (options.logdir or options.cache_dir):
    raise UserError('--model with --cache_dir, or --logdir, says what to tokenise; give one of them')
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    if options.logdir:
      run = RunDir(options.logdir)
      (_, config), cache_dir = run.load(), options.cache_dir or run.cache_dir
    else:
      data_dir = {'data_dir': files.absolute(options.data_dir)} if options.data_dir else {}
      config = options.resolve(options.model, **data_dir)
      task_of(config).check_corpus()
      config, cache_dir = task_of(config).prepare(folder, resumed=False), options.cache_dir
    task, feed = task_of(config), Feed()
    train, dev = task.train_input(cache_dir, feed), task.dev_input(cache_dir, feed)
  print(f'train: {train.stats}\ndev: {dev.stats}\ntokenised in {cache_dir}, {time.monotonic() - start:.0f} s')


if __name__ == '__main__':
  main()
