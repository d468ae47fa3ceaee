"""lingvo-moe distill RUN OUT [--n_best=N] [--data_dir=CORPUS]

Makes a corpus for a smaller model, a student: translates the training text of a run, the teacher, and writes the folder
OUT of the same pairs, whose train files have the translations as target side. Other files, such as dev and test, are
copied. `lingvo-moe train --data_dir=OUT` trains a student on it.

RUN is a log directory (or --logdir=RUN), or what lingvo-moe export --format=litert wrote, with --data_dir for its
corpus. Lines are translated by beam search as lingvo-moe translate does. With --n_best=N each comes with its N best
translations, as N lines. Lines over the model's length, and those without a translation, are left out and counted.

Type the same command in any number of processes, on machines that share the folder of OUT: each translates the lines
that no other has claimed, and ends when OUT is there. After an interruption the same command goes on; 1000 lines a
process are lost at most.
"""

import os
import shlex
import time
from collections.abc import Sequence

from lingvo_moe import translate
from lingvo_moe.cli import app, checkpoint_flags
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.core.progress import duration
from lingvo_moe.corpora import distillation, parallel
from lingvo_moe.storage import files, new_folder
from lingvo_moe.text import repetition
from lingvo_moe.text.language_tags import Languages, check_known
from lingvo_moe.text.request import SEARCH
from lingvo_moe.text.text_model import Asked, TextModel

_DECODING = 'beam_size', 'length_norm_alpha', 'length_norm_k', 'decode_ratio', 'decode_extra'


class Options(checkpoint_flags.TextOptions):
  """Options of the command."""

  out: str = flag(None, 'Folder of the corpus to make, unless it is the second argument.')
  data_dir: str | None = flag(None, "Folder of the corpus to translate; default: the run's.")
  pairs: str | None = flag(None, "Language pairs, such as 'deu-en,fra-en' or '*-en'; default: the run's.")
  split: Sequence[str] = flag((), "Prefixes of the files to translate; default: the run's corpora, train of an export.")
  n_best: int = flag(1, 'Translations of each line, at most --beam_size.', lower_bound=1)


@app.command(
  Options,
  RuntimeOptions,
  tensorflow=False,
  takes=('logdir', 'out'),
  usage='a run and a new folder are given: lingvo-moe distill runs/mine distilled',
)
def main(options: Options, runtime_options: RuntimeOptions) -> None:
  start = time.monotonic()
  if runtime_options.num_processes > 1:
    raise UserError('processes share the lines by themselves: type the command in each, without --num_processes')
  if not os.path.exists(os.path.join(options.out, distillation.RECORD)):
    new_folder.check(options.out, 'a corpus')
  model, _ = translate.load(options, runtime_options)
  if model.training_lines is None:
    raise UserError(f'a teacher translates; {options.logdir} holds a run of {model.model}, which does not')
  translator = model.translator_for(options.n_best)
  pairs = _pairs(model, options)
  languages = {pair.name: _languages(model, pair) for pair in pairs}
  names = (*_DECODING, *SEARCH, *repetition.FIELDS)
  settings = {'teacher': _fingerprint(model, options), 'n_best': options.n_best}
  settings |= {'split_sentences': options.split_sentences, **{name: translator.configured(name) for name in names}}
  settings |= distillation.text_settings(pairs)
  print(f'using the checkpoint of {model.checkpoint}')
  noted = distillation.record(options.out, settings)
  if noted:
    print(f'{options.out} is there already, made with the same settings')
  else:
    about = {'logdir': files.absolute(model.path), 'model': model.model, 'checkpoint': model.checkpoint}
    answer = lambda pair, lines, progress: model.answer(
      lines, Asked(languages[pair.name], options.n_best, pair.source), progress
    )
    noted = distillation.write(options.out, pairs, settings, about, answer)
  lines = noted['lines']
  left_out = f'{lines["too_long"]:,} {model.over_the_length}, {lines["untranslated"]:,} without a translation'
  print(f'{plural(lines["written"], "line")} of {lines["read"]:,}; left out: {left_out}')
  print(f'written to {options.out}, {duration(time.monotonic() - start)}; next, with one layer to decode:\n')
  out = shlex.quote(options.out)
  print(f'  lingvo-moe train --model={model.model} --data_dir={out} --logdir=runs/student --set decoder_layers=1')


def _pairs(model: TextModel, options: Options) -> list[parallel.Pair]:
  """The pairs of each corpus to translate."""
  config = getattr(model, 'config', None)  # of a run
  data_dir = options.data_dir or getattr(config, 'data_dir', None)
  if data_dir is None:
    raise UserError(f'an export has no corpus; saw {model.path}: give its folder as --data_dir')
  known = ','.join('-'.join(pair) for pair in model.pairs()) if config is None else config.pairs
  splits = options.split or ([corpus.prefix for corpus in config.mixture] if config else ['train'])
  prefixes = [dict(getattr(config, 'split_files', ())).get(split, split) for split in splits]
  pairs = known if options.pairs is None else options.pairs
  return [pair for prefix in prefixes for pair in parallel.find_pairs(data_dir, pairs, prefix)]


def _languages(model: TextModel, pair: parallel.Pair) -> Languages:
  """Languages of a pair as the model is asked for them; UserError where it does not translate them."""
  try:
    check_known('target', pair.target, {target for _, target in model.pairs()} | set(model.targets()))
    return model.languages(pair.target if model.targets() else None, pair.source)
  except UserError as e:
    raise UserError(f'{pair.name} of the corpus: {e}; choose other pairs with --pairs, or give another run') from None


def _fingerprint(model: TextModel, options: Options) -> str:
  """Hash of the weights, with the words on the checkpoints of an ensemble."""
  if fingerprint := getattr(model, 'fingerprint', None):
    return fingerprint
  return ' '.join([options.run.checkpoints().fingerprint(model.step), *model.checkpoint.split('; with ')[1:]])


if __name__ == '__main__':
  main()
