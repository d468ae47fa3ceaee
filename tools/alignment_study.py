"""Which decoder layer aligns words: agreement of attention with a statistical aligner on a run's own corpus.

  python tools/alignment_study.py RUN --lines=29000

The aligner is IBM Model 1, then a hidden Markov model of jumps, in both directions over the run's own pieces, made
symmetric by grow-diag-final-and. Sentences of test are aligned with the training lines. For every layer, and for the
mean and each single head, the table has the share of target tokens whose source token is one of the aligner's (of
those that it aligns), with the attention where a token is predicted and where it is read.
"""

import argparse
import collections

import numpy as np

NULL = 0


def model_1(pairs, rounds=5):
  """Probabilities p(target | source) by (source, target); IBM Model 1 with an empty word."""
  table = collections.defaultdict(lambda: 1.0)
  for _ in range(rounds):
    counts, totals = collections.Counter(), collections.Counter()
    for source, target in pairs:
      words = [NULL, *source]
      for t in target:
        weights = [table[s, t] for s in words]
        total = sum(weights)
        for s, weight in zip(words, weights):
          counts[s, t] += weight / total
          totals[s] += weight / total
    table = collections.defaultdict(lambda: 1e-9, {(s, t): c / totals[s] for (s, t), c in counts.items()})
  return table


def viterbi(pairs, table, rounds=3, widest=12):
  """Source place of each target word, -1 for none: a hidden Markov model of jumps (Vogel et al., 1996)."""
  jumps = np.full(2 * widest + 1, 1.0)
  found = []
  for _ in range(rounds):
    counts, found = np.full(2 * widest + 1, 0.1), []
    for source, target in pairs:
      n = len(source)
      emit = np.array([[table[s, t] for s in source] for t in target])
      none = np.array([table[NULL, t] for t in target]) * 0.2
      leap = np.clip(np.arange(n)[None] - np.arange(n)[:, None], -widest, widest) + widest
      step = jumps[leap] / jumps[leap].sum(axis=1, keepdims=True)
      best, back, empty = emit[0] / n, [], []
      for row, lone in zip(emit[1:], none[1:]):
        moves = best[:, None] * step * row[None]
        stay = best * lone
        before, value = moves.argmax(axis=0), moves.max(axis=0)
        empty.append(stay > value)
        back.append(np.where(stay > value, np.arange(n), before))
        best = np.maximum(value, stay)
        best = best / max(best.sum(), 1e-300)
      at = int(best.argmax())
      places = []
      for before, lone in zip(reversed(back), reversed(empty)):
        places.append(-1 if lone[at] else at)
        at = int(before[at])
      places.append(at)
      places.reverse()
      for a, b in zip(places, places[1:]):
        if a >= 0 and b >= 0:
          counts[np.clip(b - a, -widest, widest) + widest] += 1
      found.append(places)
    jumps = counts / counts.sum()
  return found


def symmetric(forward, backward, source_length):
  """Links (source, target) of both directions by grow-diag-final-and."""
  one = {(i, j) for j, i in enumerate(forward) if i >= 0}
  other = {(i, j) for i, j in enumerate(backward) if j >= 0}
  links, union = one & other, one | other
  near = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
  grown = True
  while grown:
    grown = False
    for i, j in sorted(links):
      for a, b in near:
        new = i + a, j + b
        free = new[0] not in {x for x, _ in links} or new[1] not in {y for _, y in links}
        if new in union - links and free:
          links.add(new)
          grown = True
  for new in sorted(union - links):
    if new[0] not in {x for x, _ in links} and new[1] not in {y for _, y in links}:
      links.add(new)
  return links


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('run')
  parser.add_argument('--lines', type=int, default=29_000, help='training lines for the aligner')
  parser.add_argument('--test', type=int, default=300, help='lines of test that are compared')
  options = parser.parse_args()

  import lingvo_moe
  from lingvo_moe.inputs import dev_lines
  from lingvo_moe.inputs.mt_input import TextInput
  from lingvo_moe.layers.embedding import embed

  run = lingvo_moe.load(options.run)
  config, vocabs = run.translator()._config, run._task.vocabs
  (pair, sources, targets), *_ = dev_lines.read_pairs(config, 'test')
  (_, more, more_targets), *_ = dev_lines.read_pairs(config, 'train')
  first = slice(options.test)
  texts = [*sources[first], *more[: options.lines]], [*targets[first], *more_targets[: options.lines]]
  sides = [[[i + 1 for i in ids] for ids in vocab.encode(lines)] for vocab, lines in zip(vocabs, texts)]
  pairs = [(s, t) for s, t in zip(*sides)]
  kept = [k for k, (s, t) in enumerate(pairs) if s and t]
  pairs = [pairs[k] for k in kept]
  count = sum(k < len(sources[first]) for k in kept)
  turned = [(t, s) for s, t in pairs]
  forward, backward = (viterbi(own, model_1(own))[:count] for own in (pairs, turned))
  gold = {k: symmetric(f, b, len(s)) for k, f, b, (s, _) in zip(kept, forward, backward, pairs)}

  model, program = config.program().model, config.program()
  heads = config.num_heads
  hits, total, layers = collections.Counter(), 0, config.decoder_layers

  def weights_of(weights, batch):
    theta = program.theta(weights)
    positions = batch['tgt_positions'] if model.sinusoidal else None
    x = embed(model, model.target_embedding, theta['target_embedding'], batch['tgt_inputs'], positions)
    own = x, batch['tgt_segments'], model.encode(theta, batch)[0], batch['src_segments']
    outputs = [model.decoder(theta['decoder'], *own, aligned_layer=layer) for layer in range(layers)]
    return [output.memory_weights_BnTU for output in outputs]

  attend = run._runner.function(weights_of)
  around = config.tags_around(vocabs[0], run.choose_target(pair.target if config.tag_target else None))
  begin = len(around[0].before)
  for index_B, batch in TextInput(config, vocabs, sources[first], None, targets[first]):
    by_layer = attend(batch)
    for row in np.flatnonzero(index_B >= 0):
      links = gold.get(int(index_B[row]), set())
      source = np.count_nonzero(batch['src_ids'][row]) - len(around[0].after) - begin
      for j in {j for _, j in links}:
        total += 1
        for layer, weights in enumerate(by_layer):
          own = weights[row].reshape(heads, *weights.shape[-2:])
          for where, shift in (('predicted', 0), ('read', 1)):
            kinds = {'mean': own.mean(axis=0), **{f'head {h}': own[h] for h in range(heads)}}
            for kind, weights_TU in kinds.items():
              place = int(weights_TU[j + shift, begin : begin + source].argmax())
              hits[layer + 1, where, kind] += (place, j) in links
  print(f'{len(gold)} sentences of {pair.name}, {total} target tokens that the aligner aligns; share that agrees, %')
  for (layer, where, kind), n in sorted(hits.items()):
    print(f'layer {layer} {where:9} {kind:6} {100 * n / total:5.1f}')


if __name__ == '__main__':
  main()
