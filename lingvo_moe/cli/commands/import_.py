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

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core import quiet
from lingvo_moe.storage import files

_FOLDER = flags.DEFINE_string('folder', None, 'Folder of the model, unless it is an argument.')
_LOGDIR = flags.DEFINE_string('logdir', None, 'The log directory to make.', required=True)
_SET = flags.DEFINE_multi_string(
  'set', [], 'Value of a field of the model, such as beam_size=6 or batch_tokens=8192; may be repeated.'
)


@app.command(
  tensorflow=False,
  takes=('folder',),
  usage='one folder is imported: lingvo-moe import FOLDER --logdir=RUN',
  models=False,
)
def main():
  folder = os.path.expanduser(files.plain(_FOLDER.value))
  quiet.import_tensorflow()
  from lingvo_moe.addons.interop import importing
  from lingvo_moe.core import weights

  model, config = importing.import_folder(folder, _LOGDIR.value, _SET.value)
  count = weights.count(config.model().weights())
  print(f'{_LOGDIR.value}: {model} of {count:,} weights, imported from {folder}')
  print(f'lingvo-moe translate {shlex.quote(_LOGDIR.value)} < TEXT')


if __name__ == '__main__':
  main()
