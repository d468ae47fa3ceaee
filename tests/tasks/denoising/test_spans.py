"""Span corruption: masks, inputs and targets, worked by hand and against what they are made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.temperature_sampling import fold
from lingvo_moe.tasks.denoising import spans
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
from lingvo_moe.vocab.sentencepiece_vocab import EOS
from lingvo_moe.vocab.sentinel_vocab import SentinelVocab
from lingvo_moe.vocab.text_vocab import Characters

FIRST = 99  # id of the first sentinel


def test_the_example_of_t5s_figure_2():
  # Thank you [for inviting] me to your party [last] week.
  thank, you, for_, inviting, me, to, your, party, last, week = range(10, 20)
  mask = np.array([[0, 0, 1, 1, 0, 0, 0, 0, 1, 0]], bool)
  inputs, targets = spans.corrupt(np.arange(10, 20)[np.newaxis], mask, FIRST)
  assert inputs.tolist() == [[thank, you, 99, me, to, your, party, 98, week, EOS]]
  assert targets.tolist() == [[99, for_, inviting, 98, last, 97, EOS]]


def test_noise_at_the_end_needs_no_last_sentinel():
  mask = np.array([[0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 1]], bool)
  inputs, targets = spans.corrupt(np.array([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]), mask, FIRST)
  assert inputs.tolist() == [[10, 99, 12, 13, 98, EOS], [20, 21, 99, 24, 98, EOS]]
  assert targets.tolist() == [[99, 11, 98, 14, 15, EOS], [99, 22, 23, 98, 25, EOS]]


def test_inputs_of_512_are_made_of_568_tokens_as_in_t5():
  # 15% of 568 is 85 tokens of noise, in 28 spans: 568 - 85 + 28 + 1 and 85 + 28 + 1.
  assert spans.counts(568, 0.15, 3.0) == (85, 28)
  assert spans.lengths_for(512, 0.15, 3.0) == (568, 512, 114)
  assert spans.lengths_for(512, 0.5, 3.0).inputs == 512


@given(st.integers(10, 600), st.floats(0.05, 0.4), st.floats(1.0, 8.0))
def test_inputs_are_filled_and_a_longer_window_would_be_too_long(inputs, density, mean_span):
  found = spans.lengths_for(inputs, density, mean_span)
  assert found.inputs == inputs < spans.lengths(found.window + 1, density, mean_span).inputs


@given(st.integers(2, 200), st.floats(0.01, 0.99), st.floats(1.0, 6.0), st.integers(0, 1000))
def test_masks_have_the_noise_and_the_spans_they_should_and_nothing_is_lost(length, density, mean_span, seed):
  noise = spans.counts(length, density, mean_span)
  mask = spans.random_mask(length, noise, fold(seed, np.arange(3)))
  vocab = SentinelVocab(Characters(''.join(map(chr, range(1000, 1600)))), 100)
  ids, first = 4 + np.arange(3 * length).reshape(3, length), vocab.first_sentinel
  inputs, targets = spans.corrupt(ids, mask, first)
  assert mask.shape == (3, length) and 1 <= noise.tokens < length
  assert abs(noise.tokens - length * density) <= 1 and noise.spans >= 1
  for row in range(3):
    starts = np.flatnonzero(np.diff(np.concatenate([[0], mask[row].astype(int)])) == 1)
    assert mask[row].sum() == noise.tokens and len(starts) == noise.spans
    assert not mask[row, 0] and mask[row, -1]  # text first, noise last
    found = vocab.spans(targets[row])
    assert list(found) == list(range(first, first - noise.spans, -1)) and all(found.values())
    rebuilt = [i for token in inputs[row, :-1] for i in found.get(token, [token])]
    assert rebuilt == ids[row].tolist()


def test_all_divisions_of_a_text_are_equally_likely():
  mask = spans.random_mask(5, spans.Counts(2, 2), fold('keys', np.arange(6000)))
  patterns, counts = np.unique(mask, axis=0, return_counts=True)
  # Three tokens in two segments, 1+2 or 2+1, each followed by one token of noise.
  assert patterns.astype(int).tolist() == [[0, 0, 1, 0, 1], [0, 1, 0, 0, 1]]
  assert abs(counts[0] - 3000) < 200
  longer = spans.random_mask(12, spans.Counts(4, 2), fold('keys', np.arange(21000)))
  counts = np.unique(longer, axis=0, return_counts=True)[1]
  assert len(counts) == 7 * 3 and counts.min() > 850 and counts.max() < 1150


TEXT = SentinelVocab(Characters(' abcdefg'), 3)  # ids 4 to 11, sentinels 14, 13, 12


def test_sentinels_are_the_last_ids_counting_down():
  assert TEXT.size == 15 and TEXT.first_sentinel == 14
  ids = TEXT.encode('a <extra_id_0>b<extra_id_2>')
  assert ids.tolist() == [5, 4, 14, 6, 12]
  assert TEXT.decode([*ids, EOS, 5]) == 'a <extra_id_0>b<extra_id_2>'
  with pytest.raises(UserError, match='<extra_id_0> to <extra_id_2>; saw <extra_id_3>'):
    TEXT.encode('<extra_id_3>')


def test_an_answer_fills_in_its_sentinels():
  source = TEXT.encode('ab<extra_id_0>e<extra_id_1>g')
  fill = lambda answer: TEXT.fill(source, TEXT.encode(answer))
  assert fill('<extra_id_0>cd<extra_id_1>f') == 'abcdefg'
  assert fill('c<extra_id_1>f<extra_id_1>a') == 'ab<extra_id_0>efg'  # nothing for one, and two for the other


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(sentinels=27), 'sentinels must be at least 28, the spans of a window of 568 tokens; saw 27'),
    (dict(batch_tokens=600, num_groups=2), 'batch_tokens=600 with 2 rows of 512: use at least 1024'),
    (dict(relative_distance=8), 'saw num_buckets=32, max_distance=8: use fewer buckets'),
    (dict(noise_density=1.0), 'noise_density must be above 0 and below 1; saw 1.0'),
    (dict(scan_layers=True, remat='block', num_experts=4, decoder_layers=3), 'decoder_layers must be a multiple of'),
    (dict(gate='expert_choice', num_experts=4), 'where a causal decoder has experts'),
  ],
)
def test_values_that_do_not_fit_are_refused(values, message):
  with pytest.raises(UserError, match=message):
    DenoisingConfig(**values)
