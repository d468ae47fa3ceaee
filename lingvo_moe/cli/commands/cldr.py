"""lingvo-moe cldr --out_dir=DIR [--languages=de,fr,sw] [--seed=1] [--max_pairs=10000]

Makes the default corpus, 125 languages into English, from the CLDR data in the Babel package, in seconds and without a
network. The layout is <out_dir>/<code>-en/{train,dev,test}.{<code>,en}.
"""

from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.cldr import corpus as cldr_corpus


class Options(OptionGroup):
  """Options of the command."""

  out_dir: str | None = flag(None, 'directory to write; it must be new, empty, or made by this command')
  languages: Sequence[str] | None = flag(None, 'codes or English names, or "quickstart"; all languages by default')
  seed: int = flag(cldr_corpus.DEFAULT_SEED, 'seed of the phrases')
  max_pairs: int = flag(cldr_corpus.DEFAULT_MAX_PAIRS, 'training pairs of the largest language')
  overwrite: bool = flag(False, 'write to a directory that has other files, which are kept')


@app.command(Options, tensorflow=False, models=False)
def main(options: Options) -> None:
  if not options.out_dir:
    raise UserError('nowhere to write: give --out_dir=DIR')
  languages = cldr_corpus.QUICKSTART_LANGUAGES if options.languages == ['quickstart'] else options.languages
  manifest = cldr_corpus.make_corpus(
    options.out_dir, languages, options.seed, options.max_pairs, overwrite=options.overwrite
  )
  print(cldr_corpus.table(manifest))
  print(f'written to {options.out_dir}')


if __name__ == '__main__':
  main()
