"""Target text that a vocabulary cannot write: what is said of it, and by whom."""

import forks
import pytest
import sacrebleu

from lingvo_moe.corpora import parallel
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.tasks.mt import run_vocabs, unwritten_text
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab
from lingvo_moe.vocab.vocab_training import train_vocab

SIZE = 340


def write_chinese(folder):
  """A corpus in which one target line of two has a full-width comma."""
  (folder / 'en-zh').mkdir(parents=True)
  (folder / 'en-zh' / 'train.en').write_text(''.join(f'hello, {i}\n' for i in range(40)))
  (folder / 'en-zh' / 'train.zh').write_text(
    ''.join(f'你好{",，"[i % 2]}世界{i}\n' for i in range(40)), encoding='utf-8'
  )
  return DataConfig(data_dir=str(folder), source_vocab_size=SIZE, target_vocab_size=SIZE)


SAID = (
  '20 of 40 target lines cannot be written with {} (rule: nmt_nfkc), such as U+FF0C FULLWIDTH COMMA, which becomes '
  "','; a perfect model gets BLEU {:.1f} and chrF {:.1f}: identity writes all: lingvo-moe vocab "
  '--normalization=identity, or --set target_normalization=identity'
)


def test_target_text_that_cannot_be_written_is_said_with_its_ceiling(tmp_path):
  pairs = parallel.find_pairs(write_chinese(tmp_path / 'data').data_dir)
  make = lambda name, side, **kw: train_vocab(pairs, str(tmp_path / name), SIZE, side=side, exact_size=False, **kw)
  for side in ('target', 'shared'):
    vocab = TaggedVocab(make(side, side))
    assert vocab.written(['你好，世界']) == ['你好，世界'] and unwritten_text.unwritten(vocab, pairs) == ''
  vocab = TaggedVocab(make('folded', 'target', normalization='nmt_nfkc'))
  lines = (tmp_path / 'data' / 'en-zh' / 'train.zh').read_text(encoding='utf-8').splitlines()
  folded = [line.replace('，', ',') for line in lines]
  bleu = sacrebleu.corpus_bleu(folded, [lines], tokenize='zh').score
  chrf = sacrebleu.corpus_chrf(folded, [lines]).score
  assert bleu < 95 and unwritten_text.unwritten(vocab, pairs) == SAID.format(vocab.path, bleu, chrf)


@pytest.mark.parametrize('side, is_said', [('source', False), ('target', True)])
def test_the_command_that_trains_a_vocabulary_says_it_of_target_text(side, is_said, tmp_path):
  data_dir = write_chinese(tmp_path / 'data').data_dir
  flags = [f'--data_dir={data_dir}', f'--output={tmp_path / side}', f'--side={side}', '--normalization=nmt_nfkc']
  done = forks.run(['-m', 'lingvo_moe.cli.commands.main', 'vocab', *flags, '--vocab_size=277'])
  assert done.returncode == 0, done.stderr
  assert ('20 of 40 target lines cannot be written' in done.stderr) == is_said


def test_what_a_given_target_vocabulary_cannot_write_is_said_when_a_run_begins(tmp_path, capsys):
  data = write_chinese(tmp_path / 'data')
  path = train_vocab(
    parallel.find_pairs(data.data_dir), f'{tmp_path}/v', SIZE, side='target', normalization='nmt_nfkc', exact_size=False
  )
  capsys.readouterr()
  config = MtConfig(data_dir=data.data_dir, target_vocab=path, target_normalization='identity')
  prepared = run_vocabs.prepare(config, str(tmp_path / 'vocab'), False)
  said = capsys.readouterr().err
  assert f'20 of 40 target lines cannot be written with {path} (rule: nmt_nfkc)' in said
  assert f'target_normalization=nmt_nfkc, as {path} has; the configuration has identity' in said
  assert (prepared.source_normalization, prepared.target_normalization) == ('nmt_nfkc', 'nmt_nfkc')
  run_vocabs.prepare(prepared, str(tmp_path / 'vocab'), True)
  assert 'cannot be written' not in capsys.readouterr().err


def test_a_literal_lower_one_eighth_block_cannot_be_written(tmp_path, capsys):
  data = write_chinese(tmp_path / 'data')
  with open(tmp_path / 'data' / 'en-zh' / 'train.zh', 'a', encoding='utf-8') as f:
    f.write('a\u2581b\n\ta  b  \n')
  with open(tmp_path / 'data' / 'en-zh' / 'train.en', 'a', encoding='utf-8') as f:
    f.write('a\na\n')
  run_vocabs.prepare(data, str(tmp_path / 'vocab'), resumed=False)
  said = capsys.readouterr().err
  assert '\n1 of 42 target lines' in f'\n{said}' and "such as U+2581 LOWER ONE EIGHTH BLOCK, which becomes ' '" in said
  assert ': leave those characters out of the text\n' in said
