"""What terms cost: the share of a glossary's terms that are produced, BLEU, and time, with and without constraints.

  python tools/terms_study.py RUN --test=1000

Each batch of 64 sentences of test has a glossary of its references: words of four letters or more that IBM Model 1,
trained on the training lines by words, aligns with a word of the source. Its terms hold for all sentences of the batch
that have their words: those of a glossary that `agrees` are in the references of all of these, those of `any` in one.
"""

import argparse
import re
import time

import alignment_study
from sacrebleu.metrics import BLEU

from lingvo_moe.search.automaton import occurs

_WORD = re.compile(r'\w{4,}')


def terms_of(source, reference, table, most):
  """(source word, reference word) pairs that the table aligns best."""
  pairs = []
  for target in dict.fromkeys(_WORD.findall(reference)):
    own = max(_WORD.findall(source), key=lambda word: table[word, target], default=None)
    if own and table[own, target] > 0.2:
      pairs.append((table[own, target], own, target))
  return [(own, target) for _, own, target in sorted(pairs)[:most]]  # the rarest choices first


def fitting(glossary, pairs):
  """Terms that are in the references of all sentences that have their words."""
  is_in_all = lambda s, t: all(occurs(t, reference) for source, reference in pairs if occurs(s, source))
  return {s: t for s, t in glossary.items() if is_in_all(s, t)}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('run')
  parser.add_argument('--lines', type=int, default=29_000, help='training lines for the aligner')
  parser.add_argument('--test', type=int, default=1000, help='lines of test that are translated')
  options = parser.parse_args()

  import lingvo_moe
  from lingvo_moe.inputs import dev_lines
  from lingvo_moe.search.request import TranslationRequest

  run = lingvo_moe.load(options.run)
  translator, config = run.translator(), run.config
  (_, sources, references), *_ = dev_lines.read_pairs(config, 'test')
  (_, *training), *_ = dev_lines.read_pairs(config, 'train')
  words = [tuple(map(_WORD.findall, pair)) for pair in zip(*(side[: options.lines] for side in training))]
  table = alignment_study.model_1(words)
  sources, references = sources[: options.test], references[: options.test]
  pairs = list(zip(sources, references))
  translator.translate(sources[:64])  # traces the programs
  translator.translate(sources[:64], request=TranslationRequest(ban=('xyzzy',)))
  for most, kind in (1, 'agrees'), (2, 'agrees'), (1, 'any'):
    glossaries = [{} for _ in range(0, len(sources), 64)]
    for i, pair in enumerate(pairs):
      glossaries[i // 64].update(terms_of(*pair, table, most))
    if kind == 'agrees':
      glossaries = [fitting(own, pairs[64 * k :][:64]) for k, own in enumerate(glossaries)]
    wanted = [[t for s, t in glossaries[i // 64].items() if occurs(s, source)] for i, source in enumerate(sources)]
    for name in 'without', 'with':
      begin, texts = time.perf_counter(), []
      for number, glossary in enumerate(glossaries):
        request = TranslationRequest(terms=tuple(glossary.items()) if name == 'with' else ())
        answers = translator.translate(sources[64 * number :][:64], request=request)
        texts += [best.text for best, *_ in answers.hypotheses]
      seconds, count = time.perf_counter() - begin, sum(map(len, wanted))
      share = 100 * sum(occurs(term, text) for text, own in zip(texts, wanted) for term in own) / count
      bleu = BLEU().corpus_score(texts, [references]).score
      print(
        f'{most} a sentence, {kind}, {name:7}: {count} terms, {share:5.1f}% there, BLEU {bleu:.1f}, {seconds:.1f} s'
      )


if __name__ == '__main__':
  main()
