#!/usr/bin/env python
"""python tools/compare_exports.py OUT OTHER --data_dir=DATA [--split=test] [--max_sentences=40]

Compares two LiteRT exports of a translation run, such as one with int8 weights with one in float32, on references: log
p, and the experts that each gate chooses for each token. Both read the same symbols.
"""

import numpy as np
from absl import flags

import lingvo_moe
from lingvo_moe.addons.engine import stages
from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text

_DATA_DIR = flags.DEFINE_string('data_dir', None, 'The corpus.', required=True)
_SPLIT = flags.DEFINE_string('split', 'test', 'The held-out set: test, dev or any file prefix.')
_SENTENCES = flags.DEFINE_integer('max_sentences', 40, 'Lines of each pair; 0: all.', lower_bound=0)


@app.command(arguments=True)
def main(argv):
  if len(argv) != 3:
    raise UserError(f'two exports are compared: tools/compare_exports.py OUT OTHER --data_dir=DATA; saw {argv[1:]}')
  models = [lingvo_moe.load(path, threads=1) for path in argv[1:]]  # one lane: tokens are in one order
  scores, choices = zip(*map(scores_and_choices, models), strict=True)
  tokens, first, second = sum(s.tokens for s in scores[0]), *([s.log_prob for s in of_model] for of_model in scores)
  apart = np.subtract(second, first)
  print(f'{len(apart)} references, {tokens} symbols: log p differs by {np.abs(apart).sum() / tokens:.2g} per symbol')
  others = {layer: chosen != choices[1][layer] for layer, chosen in choices[0].items()}
  if others:  # a dense model has no gate
    others['all'] = np.concatenate(list(others.values()))
  for layer, is_other_F in others.items():
    print(f'{layer}: {len(is_other_F)} tokens, {is_other_F.mean():.2%} with other experts')


def scores_and_choices(model):
  """Scores of the references of all pairs, and sets of experts by layer, as numbers, of all tokens."""
  chosen = {}

  def noted(experts, tokens_GSM, expert_GSR, weight_GSR):
    sets = np.where(weight_GSR > 0, 2.0**expert_GSR, 0).sum(axis=-1).ravel()
    chosen.setdefault(id(experts), []).append(sets[sets > 0])
    return call(experts, tokens_GSM, expert_GSR, weight_GSR)

  call, stages.ExportedExperts.__call__ = stages.ExportedExperts.__call__, noted
  try:
    scores = []
    for pair in parallel.find_pairs(_DATA_DIR.value, ','.join('-'.join(pair) for pair in model.pairs()), _SPLIT.value):
      lines = [list(text.lines(files))[: _SENTENCES.value or None] for files in (pair.source_files, pair.target_files)]
      target = pair.target if model.settings['tagged'] else None
      scores += model.score(list(zip(*lines, strict=True)), target)
  finally:
    stages.ExportedExperts.__call__ = call
  return scores, {f'layer of experts {i}': np.concatenate(sets) for i, sets in enumerate(chosen.values())}


if __name__ == '__main__':
  main()
