"""lingvo-moe import FOLDER --logdir=RUN
lingvo-moe import --hub=OWNER/NAME --logdir=RUN

Imports a public checkpoint. FOLDER is a model as the hub of Hugging Face lays it out: config.json, model.safetensors or
its shards with their index, and the files of its tokeniser. --hub downloads these files first, into the hub's own cache
($HF_HOME); without it nothing is looked up on a network. RUN becomes a log directory with one checkpoint, of step 0,
that decode, translate, serve, score, export and lint take like any other, and whose weights training begins with:

  lingvo-moe translate RUN < source.txt
  lingvo-moe train --init_from=RUN --logdir=runs/mine --data_dir=CORPUS

Families: Marian, OPUS-MT, M2M100, NLLB-200, NLLB-MoE, T5, mT5, Switch Transformers, Mixtral. docs/import.md lists what
of each is read. Nothing in the folder is executed; pickled weights (pytorch_model.bin) are read where torch is
installed, and refused if they hold more than tensors. Memory holds one tensor at a time.
"""

import os
import shlex
from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.cli.model_flags import SettingOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core import quiet
from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files, new_folder


class Options(SettingOptions):
  """Options of the command."""

  folder: str | None = flag(None, 'Folder of the model, unless it is an argument.')
  hub: str | None = flag(None, "Model to download from Hugging Face's hub, such as Helsinki-NLP/opus-mt-de-en.")
  revision: str | None = flag(None, 'Branch, tag or commit of --hub; default: the newest. The run notes the commit.')
  logdir: str = flag(None, 'The log directory to make.', required=True)


@app.command(Options, tensorflow=False, arguments=True, models=False)
def main(argv: Sequence[str], options: Options) -> None:
  given = [*argv[1:], *filter(None, (options.folder, options.hub))]
  if len(given) != 1:
    usage = 'lingvo-moe import FOLDER --logdir=RUN, or lingvo-moe import --hub=OWNER/NAME --logdir=RUN'
    raise UserError(f'one model is imported: {usage}; saw {" ".join(given) or "none"!r}')
  if options.revision and not options.hub:
    raise UserError(f'--revision is of a model of --hub; saw {options.revision!r} with a folder')
  new_folder.check(options.logdir, 'an imported model', '--logdir')
  quiet.import_tensorflow()
  from lingvo_moe.addons.interop import hub_download, importing
  from lingvo_moe.core import weights

  folder, origin = os.path.expanduser(files.plain(given[0])), ''
  if options.hub:
    folder, origin = hub_download.download(options.hub, options.revision or '')
  model, config = importing.import_folder(folder, options.logdir, options.set, origin)
  count = weights.count(config.model().weights())
  print(f'{options.logdir}: {model} of {count:,} weights, imported from {origin or folder}')
  print(f'lingvo-moe translate {shlex.quote(options.logdir)} < TEXT')


if __name__ == '__main__':
  main()
