"""Paired bootstrap: sacreBLEU's scores and p, and sentences that several languages share."""

import random

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from lingvo_moe.addons.analysis import significance
from lingvo_moe.addons.analysis.significance import METRICS

WORDS = ['the', 'dog', 'sleeps', 'on', 'a', 'green', 'bank', '.', '(', 'Müller)', "isn't", '3,5', 'x', 'under', 'trees']


def texts(lines=60, seed=0):
  rng = random.Random(seed)
  return [' '.join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(lines)]


def noisy(references, part, seed):
  """Translations that lack a part of the words, and have some of them twice."""
  rng = random.Random(seed)
  return [
    ' '.join(w for w in line.split() for _ in range(rng.choice((0, 2)) if rng.random() < part else 1))
    for line in references
  ]


def counts(translations, references, tokenizer='13a'):
  return significance.LineCounts(references, tokenizer)(translations)


def expected_scores(translations, references, tokenizer='13a'):
  return {
    'BLEU': BLEU(tokenize=tokenizer).corpus_score(translations, [references]).score,
    'chrF2': CHRF().corpus_score(translations, [references]).score,
    'chrF++': CHRF(word_order=2).corpus_score(translations, [references]).score,
  }


def test_counts_of_a_line_are_what_a_person_counts():
  (line,) = counts(['ab c'], ['ab d'], '13a')
  # 2 words each; 'ab' matches; no pair of words does
  assert line[:10].tolist() == [2, 2, 1, 0, 0, 0, 2, 1, 0, 0]
  # characters without the space: a b c and a b d; pairs ab bc and ab bd; abc and abd; none longer
  assert line[10:28].tolist() == [3, 3, 2, 2, 2, 1, 1, 1, 0, *[0] * 9]
  assert line[28:].tolist() == [2, 2, 1, 1, 1, 0]
  precision = (2 / 3 + 1 / 2 + 0) / 3  # recall is the same, and so is chrF
  assert significance.corpus_scores(line[None])['chrF2'] == pytest.approx(100 * precision)
  assert significance.corpus_scores(line[None])['chrF++'] == pytest.approx(100 * (3 * precision + 1 / 2 + 0) / 5)


@hypothesis.given(
  st.lists(st.tuples(*[st.lists(st.sampled_from(WORDS), max_size=7).map(' '.join)] * 2), min_size=1, max_size=6)
)
@hypothesis.settings(max_examples=60)
def test_scores_of_summed_counts_are_sacrebleus(pairs):
  translations, references = map(list, zip(*pairs))
  found = significance.corpus_scores(counts(translations, references))
  assert found == pytest.approx(expected_scores(translations, references), abs=1e-9)


@pytest.mark.parametrize('tokenizer', ['char', 'zh'])
def test_scripts_without_spaces_are_counted_by_sacrebleus_tokenizers(tokenizer):
  references, translations = ['我们今天去公园散步。', '我们吃饭'], ['我们今天去学校散步。', '你们吃饭']
  found = significance.corpus_scores(counts(translations, references, tokenizer))
  assert found == pytest.approx(expected_scores(translations, references, tokenizer), abs=1e-9)
  assert found['BLEU'] > 20


@pytest.mark.parametrize('parts', [(0.3, 0.28), (0.3, 0.2), (0.05, 0.5), (0.3, 0.3)])
def test_one_pair_is_tested_as_sacrebleu_tests_it(parts):
  references = texts(200)
  one, two = (noisy(references, part, seed) for seed, part in enumerate(parts))
  found = significance.paired_bootstrap(counts(one, references), counts(two, references), samples=300)
  metrics = {'BLEU': BLEU(), 'chrF2': CHRF(), 'chrF++': CHRF(word_order=2)}
  _, expected = PairedTest([('one', one), ('two', two)], metrics, [references], 'bs', n_samples=300)()
  for metric, name in zip(METRICS, ('BLEU', 'chrF2', 'chrF2++')):
    (baseline, system), d = expected[name], found[metric]
    assert (d.baseline, d.system) == pytest.approx((baseline.score, system.score), abs=1e-9)
    assert d.p == system.p_value
    assert d.low < d.difference < d.high


def test_another_seed_is_sacrebleus_too(monkeypatch):
  references = texts(100)
  one, two = noisy(references, 0.3, 1), noisy(references, 0.28, 2)
  monkeypatch.setenv('SACREBLEU_SEED', '7')
  _, expected = PairedTest([('one', one), ('two', two)], {'BLEU': BLEU()}, [references], 'bs', n_samples=200)()
  found = significance.paired_bootstrap(counts(one, references), counts(two, references), samples=200, seed=7)
  assert found['BLEU'].p == expected['BLEU'][1].p_value != 1 / 201


def test_a_system_beside_itself_has_no_difference_and_p_1():
  references = texts(50)
  same = counts(noisy(references, 0.3, 1), references)
  for found in (
    significance.paired_bootstrap(same, same, samples=100),
    significance.mean_bootstrap([same, same], [same, same], [np.arange(50)] * 2, samples=100),
  ):
    for d in found.values():
      assert (d.difference, d.low, d.high, d.p) == (0, 0, 0, 1) and d.baseline > 10


def test_swapped_sides_flip_the_sign_and_keep_p():
  references = texts(80)
  one, two = (counts(noisy(references, part, 1), references) for part in (0.3, 0.28))
  ids = [np.arange(80), np.arange(80, 160)]
  for there, back in (
    (significance.paired_bootstrap(one, two), significance.paired_bootstrap(two, one)),
    (
      significance.mean_bootstrap([one, two], [two, two], ids),
      significance.mean_bootstrap([two, two], [one, two], ids),
    ),
  ):
    for metric in METRICS:
      a, b = there[metric], back[metric]
      assert a.difference == -b.difference != 0 and (a.low, a.high) == (-b.high, -b.low)
      assert a.p == b.p


def test_the_mean_of_one_pair_is_that_pair():
  references = texts(80)
  one, two = (counts(noisy(references, part, 1), references) for part in (0.3, 0.2))
  alone = significance.paired_bootstrap(one, two)
  for metric, d in significance.mean_bootstrap([one], [two], [np.arange(80)]).items():
    assert d[:4] == pytest.approx(alone[metric][:4], abs=1e-4)  # float32 there, as sacreBLEU's


def test_the_mean_is_plain_over_pairs_however_many_lines_they_have():
  sides = [[counts(noisy(texts(n), part, n), texts(n)) for n in (30, 90)] for part in (0.3, 0.2)]
  found = significance.mean_bootstrap(*sides, [np.arange(30), np.arange(30, 120)], samples=50)
  for metric, d in found.items():
    one, two = ([significance.corpus_scores(c)[metric] for c in side] for side in sides)
    assert (d.baseline, d.system) == pytest.approx((sum(one) / 2, sum(two) / 2))


def test_a_language_that_says_the_same_again_tells_nothing_new():
  # Counting it as an independent one would shrink the interval by the square root of 2.
  references = texts(300)
  one, two = (counts(noisy(references, part, seed), references) for seed, part in enumerate((0.3, 0.25)))
  width = lambda d: d.high - d.low
  alone = significance.mean_bootstrap([one], [two], [np.arange(300)])
  twice = significance.mean_bootstrap([one] * 2, [two] * 2, [np.arange(300)] * 2)
  apart = significance.mean_bootstrap([one] * 2, [two] * 2, [np.arange(300), np.arange(300, 600)])
  for metric in METRICS:
    assert width(twice[metric]) == pytest.approx(width(alone[metric]))
    assert width(apart[metric]) == pytest.approx(width(alone[metric]) / 2**0.5, rel=0.12)


def test_the_mean_agrees_with_a_plain_loop_over_sentences():
  # Two languages with sentences 0 1 2 3 and 1 3, the second with sentence 3 twice.
  ids = [np.array([0, 1, 2, 3]), np.array([1, 3, 3])]
  references = [texts(4, seed=1), texts(3, seed=2)]
  sides = [[counts(noisy(r, part, 3), r) for r in references] for part in (0.6, 0.2)]
  found = significance.mean_bootstrap(*sides, ids, samples=40, seed=5)
  differences = {metric: [] for metric in METRICS}
  for drawn in np.random.default_rng(5).choice(4, size=(40, 4)):
    lines = [[i for sentence in drawn for i in np.flatnonzero(own == sentence)] for own in ids]
    scored = [[significance.corpus_scores(c[i]) for c, i in zip(side, lines)] for side in sides]
    for metric in METRICS:
      differences[metric].append(np.mean([b[metric] - a[metric] for a, b in zip(*scored)]))
  for metric, d in found.items():
    ordered = sorted(differences[metric])
    assert (d.low, d.high) == pytest.approx((ordered[1], ordered[38]))
    centred = np.abs(np.array(ordered) - np.mean(ordered))
    assert d.p == (np.sum(centred >= abs(d.difference)) + 1) / 41


def test_sentences_are_found_by_the_common_language_whichever_side_it_is_on():
  sets = [
    {'deu': ['eins', 'zwei', 'drei'], 'en': ['one', 'two', 'three']},
    {'en': ['three', 'one'], 'fra': ['trois', 'un']},
    {'nld': ['vier'], 'en': ['four']},
  ]
  ids, how = significance.sentence_ids(sets)
  assert [i.tolist() for i in ids] == [[0, 1, 2], [2, 0], [3]] and how == "jointly, by the text in 'en'"
  assert significance.joined(ids) == [[0, 1], [2]]


def test_where_all_sets_are_of_the_same_lines_they_go_by_line_number():
  de, fr, en = ['a', 'b', 'b'], ['c', 'd', 'e'], ['x', 'x', 'z']
  ids, how = significance.sentence_ids([{'de': de, 'en': en}, {'fr': fr, 'de': de}, {'en': en, 'fr': fr}])
  assert [i.tolist() for i in ids] == [[0, 1, 2]] * 3 and how == 'jointly, by line'
  # A set that no language links to the others is of other sentences.
  ids, how = significance.sentence_ids([{'de': de, 'en': en}, {'fr': fr, 'de': de}, {'pl': en, 'cs': fr}])
  assert [i.tolist() for i in ids] == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
  'sets',
  [
    [{'de': ['a', 'b'], 'en': ['c', 'd']}, {'fr': ['e'], 'en': ['f']}],
    [{'de': ['a', 'b'], 'en': ['c', 'd']}, {'fr': ['e'], 'pl': ['f']}],
  ],
)
def test_sets_without_a_sentence_in_common_are_resampled_each_for_itself(sets):
  ids, how = significance.sentence_ids(sets)
  assert [i.tolist() for i in ids] == [[0, 1], [2]] and how == 'each pair for itself'
  assert significance.joined(ids) == [[0], [1]]


def test_as_many_translations_as_references_are_counted():
  with pytest.raises(ValueError, match='1 translations for 2 references'):
    significance.LineCounts(['a', 'b'], '13a')(['a'])


def test_sacrebleu_says_of_a_system_beside_itself_what_is_not_said_here():
  # The reason for the one departure from its p; if this fails, sacreBLEU has mended it.
  references = texts(30)
  _, found = PairedTest([('a', references), ('b', references)], {'BLEU': BLEU()}, [references], 'bs', n_samples=99)()
  assert found['BLEU'][1].p_value == 1 / 100 and sacrebleu.__version__
