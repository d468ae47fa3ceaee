"""lingvo-moe distill RUN OUT [--n_best=N] [--data_dir=CORPUS]

Makes the corpus of a student, a smaller model: writes a folder OUT with the pairs of a corpus, in which the target side
of train is what a teacher translates. Other files, such as dev and test, are copied. The teacher is RUN, a log
directory (or --logdir=RUN), or what lingvo-moe export --format=litert wrote, with --data_dir for the corpus.

Lines are translated as lingvo-moe translate does. With --n_best=N each comes with its N best translations, as N lines.
Lines over the model's length, and those without a translation, are left out and counted.

Type the same command in any number of processes, on machines that share the folder of OUT: each translates the lines
that no other has claimed. After an interruption the same command goes on; a process loses 1000 lines at most.
"""

import shlex

from lingvo_moe import translate
from lingvo_moe.cli import app, checkpoint_flags
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.corpora import distillation, parallel
from lingvo_moe.storage import files
from lingvo_moe.text.text_model import Asked
from lingvo_moe.vocab.language_tags import check_known

_USAGE = 'a run and a new folder are given: lingvo-moe distill runs/mine distilled'


class Options(checkpoint_flags.TextOptions):
  """Options of the command."""

  out: str = flag(None, 'Folder to write, unless it is the second argument.')
  data_dir: str | None = flag(None, "Folder of the corpus; default: the run's.")
  pairs: str | None = flag(None, "Language pairs, such as 'deu-en,fra-en' or '*-en'; default: the run's.")
  split: str = flag('train', 'Prefix of the files to translate; others are copied.')
  n_best: int = flag(1, 'Translations of each line, at most --beam_size.', lower_bound=1)


@app.command(Options, RuntimeOptions, tensorflow=False, takes=('logdir', 'out'), usage=_USAGE)
def main(options: Options, runtime_options: RuntimeOptions) -> None:
  if runtime_options.num_processes > 1:
    raise UserError('processes share the lines by themselves: type the command in each, without --num_processes')
  distillation.is_finished(options.out)  # refuses what is there before it loads the teacher
  model, _ = translate.load(options, runtime_options)
  if model.training_lines is None:
    raise UserError(f'a teacher translates; {model.path} holds a run of {model.model}, which does not')
  config = getattr(model, 'config', None)  # of a run
  if not (config or options.data_dir):
    raise UserError(f'an export has no corpus; saw {model.path}: give its folder as --data_dir')
  known = config.pairs if config else ','.join(map('-'.join, model.pairs()))
  prefix = dict(config.split_files if config else ()).get(options.split, options.split)
  names = known if options.pairs is None else options.pairs
  pairs = parallel.find_pairs(options.data_dir or config.data_dir, names, prefix)
  model.translator_for(options.n_best)  # refuses what it cannot do
  with model.named_in_refusals():
    for pair in pairs:
      check_known('target', pair.target, {*model.targets(), *(target for _, target in model.pairs())})
    languages = {p.name: model.languages(p.target if model.targets() else None, p.source) for p in pairs}
  print(f'using the checkpoint of {model.checkpoint}')

  settings = {name: getattr(options, name) for name in (*checkpoint_flags.DECODING, 'split_sentences', 'n_best')}
  settings |= {'teacher': files.absolute(model.path), 'model': model.model, 'step': model.step}
  settings |= {'weights': model.fingerprint, 'beam_size': model.beam_size}
  asked = lambda pair: Asked(languages[pair.name], options.n_best, pair.source)
  answer = lambda pair, lines, progress: model.answer(lines, asked(pair), progress)
  made = distillation.distill(options.out, pairs, settings, answer)
  left_out = f'{made["too_long"]:,} {model.over_the_length}, {made["untranslated"]:,} without a translation'
  print(
    f'{options.out}: {plural(made["lines"], "line")}, {plural(made["pairs"], "pair")}; left out: {left_out}; next:\n'
  )
  corpus = f'--model={model.model} --data_dir={shlex.quote(options.out)}'
  print(f'  lingvo-moe train {corpus} --logdir=runs/student --set decoder_layers=1')


if __name__ == '__main__':
  main()
