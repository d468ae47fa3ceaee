"""lingvo-moe import FOLDER --logdir=RUN

Imports a public checkpoint. FOLDER is a model as the hub of Hugging Face lays it out: config.json, model.safetensors or
its shards with their index, and the files of its tokeniser. RUN becomes a log directory with one checkpoint, of step 0,
that decode, translate, serve, score, export and lint take like any other, and whose weights training begins with:

  lingvo-moe translate RUN < source.txt
  lingvo-moe train --init_from=RUN --logdir=runs/mine --data_dir=CORPUS

Families are those of docs/import.md. Nothing in the folder is executed; pickled weights (pytorch_model.bin) are
read where torch is installed, and refused if they hold more than tensors. Memory holds one tensor at a time.
"""

import os
import shlex

from lingvo_moe.cli import app
from lingvo_moe.cli.model_flags import SettingOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core import quiet
from lingvo_moe.storage import files


class Options(SettingOptions):
  """Options of the command."""

  folder: str = flag(None, 'Folder of the model, unless it is an argument.')
  logdir: str = flag(None, 'The log directory to make.', required=True)


@app.command(
  Options,
  tensorflow=False,
  takes=('folder',),
  usage='one folder is imported: lingvo-moe import FOLDER --logdir=RUN',
  models=False,
)
def main(options: Options) -> None:
  folder = os.path.expanduser(files.plain(options.folder))
  quiet.import_tensorflow()
  from lingvo_moe.addons.interop import importing
  from lingvo_moe.core import weights

  model, config = importing.import_folder(folder, options.logdir, options.set)
  count = weights.count(config.model().weights())
  print(f'{options.logdir}: {model} of {count:,} weights, imported from {folder}')
  print(f'lingvo-moe translate {shlex.quote(options.logdir)} < TEXT')


if __name__ == '__main__':
  main()
