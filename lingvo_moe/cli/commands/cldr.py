"""lingvo-moe cldr --out_dir=DIR [--languages=de,fr,sw] [--seed=1] [--max_pairs=10000]

Makes the default corpus, 125 languages into English, from the CLDR data in the Babel package, in seconds and without a
network. The layout is <out_dir>/<code>-en/{train,dev,test}.{<code>,en}.
"""

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.cldr import corpus as cldr_corpus

FLAGS = flags.FLAGS
flags.DEFINE_string('out_dir', None, 'directory to write; it must be new, empty, or made by this command')
flags.DEFINE_list('languages', None, 'codes or English names, or "quickstart"; all languages by default')
flags.DEFINE_integer('seed', cldr_corpus.DEFAULT_SEED, 'seed of the phrases')
flags.DEFINE_integer('max_pairs', cldr_corpus.DEFAULT_MAX_PAIRS, 'training pairs of the largest language')
flags.DEFINE_bool('overwrite', False, 'write to a directory that has other files, which are kept')


@app.command(tensorflow=False, models=False)
def main():
  if not FLAGS.out_dir:
    raise UserError('nowhere to write: give --out_dir=DIR')
  languages = FLAGS.languages
  if languages == ['quickstart']:
    languages = cldr_corpus.QUICKSTART_LANGUAGES
  manifest = cldr_corpus.make_corpus(FLAGS.out_dir, languages, FLAGS.seed, FLAGS.max_pairs, overwrite=FLAGS.overwrite)
  print(cldr_corpus.table(manifest))
  print(f'written to {FLAGS.out_dir}')


if __name__ == '__main__':
  main()
