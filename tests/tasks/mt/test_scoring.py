"""Scores of translations: equal to sacreBLEU's own, and their table."""

import importlib.util

import pytest
import sacrebleu

from lingvo_moe.core.quality import METRICS, Metric
from lingvo_moe.tasks import metrics
from lingvo_moe.tasks.mt import scoring

SOURCES = ['Der Hund schläft .', 'Das Haus ist groß und 3,5 m hoch.', '']
REFERENCES = ['The dog is sleeping.', 'The house is big and 3.5 m high.', '']
TRANSLATIONS = ['The dog sleeps.', 'The house is large and 3.5 m high.', '']


def scores(bleu, copy_bleu=1.0):
  signatures = {'bleu_signature': 'BLEU|tok:13a', 'chrf_signature': 'chrF2|nc:6'}
  return {'sentences': 100, 'bleu': bleu, 'chrf': 2 * bleu, 'copy_bleu': copy_bleu, 'copy_chrf': 9.0, **signatures}


def test_scores_are_sacrebleus():
  s = scoring.References(SOURCES, REFERENCES, 'en').score(TRANSLATIONS, truncated=1)
  assert s['bleu'] == sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score > 30
  assert s['chrf'] == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score
  assert s['copy_bleu'] == sacrebleu.corpus_bleu(SOURCES, [REFERENCES]).score < s['bleu']
  assert s['copy_chrf'] == sacrebleu.corpus_chrf(SOURCES, [REFERENCES]).score
  assert (s['sentences'], s['truncated']) == (3, 1)
  assert s['bleu_signature'].startswith('BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:')
  assert s['chrf_signature'].startswith('chrF2|nrefs:1|case:mixed|')


def test_references_can_be_used_again():
  references = scoring.References(SOURCES, REFERENCES, 'en')
  assert references.score(TRANSLATIONS) == references.score(TRANSLATIONS)
  assert references.score(REFERENCES)['bleu'] == pytest.approx(100)


@pytest.mark.parametrize('language', ['mya', 'th', 'lao-Laoo', 'khm', 'bo'])
def test_scripts_without_spaces_are_split_by_character(language):
  s = scoring.References(['x'], ['သူသည်အိမ်သို့သွားသည်'], language).score(['သူသည်အိမ်မှသွားသည်'])
  assert s['bleu'] > 50 and 'tok:char' in s['bleu_signature']


@pytest.mark.parametrize('language', ['zh', 'zho', 'cmn', 'lzh', 'zh-CN', 'zh_Hant', 'ZH', 'Zh-Hant'])
def test_chinese_is_split_by_character(language):
  s = scoring.References(['x'], ['我们今天去公园散步。'], language).score(['我们今天去学校散步。'])
  assert s['bleu'] > 20 and 'tok:zh' in s['bleu_signature']


@pytest.mark.parametrize(('language', 'module', 'name'), [('jpn', 'MeCab', 'ja-mecab'), ('ko', 'mecab_ko', 'ko-mecab')])
def test_japanese_and_korean_are_split_by_mecab_or_where_it_is_missing_by_character(
  language, module, name, monkeypatch
):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda m: None if m == module else 1 / 0)
  assert scoring.tokenizer(language, ['', '3']) == 'char'
  monkeypatch.setattr(importlib.util, 'find_spec', lambda m: m == module)
  assert scoring.tokenizer(language, ['', '3']) == name


CHINESE, JAPANESE, KOREAN = '我们今天去の公园散步。天气很好。AB', '今日は公園に行きます。', '오늘 공원에 갑니다.'
THAI, KHMER, LATIN = 'วันนี้เราไปสวนสาธารณะ 3 GB', 'ថ្ងៃនេះ', 'Heute gehen wir 到 Park.'


@pytest.mark.parametrize(
  ('language', 'reference', 'name'),
  [
    *((code, CHINESE, 'zh') for code in ('cn', 'zhs', 'cht', 'zh', 'x')),
    *((code, JAPANESE, 'ja-mecab') for code in ('jp', 'ja', 'zh')),
    *((code, '2024年3月5日', kind) for code, kind in (('ja', 'ja-mecab'), ('ko', 'ko-mecab'), ('jp', 'zh'))),
    *((code, KOREAN, 'ko-mecab') for code in ('kr', 'ko')),
    *((code, THAI, 'char') for code in ('thai', 'th', 'x')),
    *((code, text, 'char') for code, text in (('kh', KHMER), ('shn', 'သူသည်'), ('zh', KHMER))),
    *((code, LATIN, '13a') for code in ('de', 'th', 'nan', 'zh')),
    ('zh', '2024', 'zh'),
    ('de', '2024', '13a'),
  ],
)
def test_words_are_split_as_the_script_of_the_references_asks(language, reference, name, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda module: module)
  assert scoring.tokenizer(language, [reference, '']) == name
  told = scoring.notices({'en-x': (language, [reference, ''], ['', ''])})
  disagree = {('zh', '日'), ('zh', 'ថ'), ('th', 'H'), ('nan', 'H'), ('zh', 'H'), ('zh', '今')}
  assert bool(told) == ((language, reference[0]) in disagree)
  assert all(line.endswith(f'by {name} in en-x') for line in told)


@pytest.mark.parametrize(('tokenised', 'lines', 'told'), [(99, 300, 0), (100, 300, 1), (1, 3, 0), (2, 3, 1), (0, 0, 0)])
@pytest.mark.parametrize('side', [0, 1])
def test_text_that_looks_tokenised_is_told_once_for_all_pairs(tokenised, lines, told, side):
  plain = ['A dog.'] * lines
  sides = [['A dog .'] * tokenised + plain[tokenised:], plain]
  pairs = {f'de-{i:02}': ('en', sides[side], sides[1 - side]) for i in range(7)}
  notices = scoring.notices({**pairs, 'de-x': ('en', plain, plain)})
  assert len(notices) == told
  assert all(line.endswith('; de-00, de-01, de-02, de-03, de-04, ...') for line in notices)


def test_the_mean_is_over_pairs():
  mean = scoring.mean_scores({'a-en': scores(10.0, 1.0), 'b-en': scores(20.0, 4.0)})
  assert mean == {'bleu': 15.0, 'chrf': 30.0, 'copy_bleu': 2.5, 'copy_chrf': 9.0}


def test_a_table_has_every_pair_then_signatures_then_the_mean():
  assert scoring.table({'b-en': scores(20.04, 4.0), 'long-name-en': scores(10.0)}).splitlines() == [
    'pair          sentences   BLEU   chrF  copy BLEU',
    'b-en                100   20.0   40.1        4.0',
    'long-name-en        100   10.0   20.0        1.0',
    'BLEU|tok:13a',
    'chrF2|nc:6',
    'mean BLEU 15.0 over 2 pairs (copying the source: 2.5)',
  ]


def test_a_metric_that_an_earlier_result_lacks_is_empty_and_has_no_mean(monkeypatch):
  monkeypatch.setitem(METRICS, 'new', Metric('new', 'new', None))
  monkeypatch.setattr(scoring, '_COLUMNS', (*scoring._COLUMNS, metrics.Column('new', 'new', '5.1f')))
  both = {'a-en': scores(20.0) | {'new': 51.24}, 'b-en': scores(10.0)}
  head, a, b, *_ = scoring.table(both).splitlines()
  assert head == 'pair  sentences   BLEU   chrF  copy BLEU    new'
  assert a == 'a-en        100   20.0   40.0        1.0   51.2'
  assert b.rstrip() == 'b-en        100   10.0   20.0        1.0'
  assert 'new' not in scoring.mean_scores(both) and scoring.mean_scores({'a-en': both['a-en']})['new'] == 51.24


@pytest.mark.parametrize(('best', 'told'), [(None, 0), (100.0, 0), (99.95, 0), (78.6, 1)])
def test_a_table_says_where_the_vocabulary_bounds_the_score(best, told):
  bounded = scores(10.0) | {'best_bleu': best, 'best_chrf': 70.64}
  lines = scoring.table({'en-cmn': bounded, 'en-de': scores(20.0)}).splitlines()
  line = 'the target vocabulary cannot write all references of 1 pair; of en-cmn BLEU is at most 78.6, chrF 70.6'
  assert lines.count(line) == told and len(lines) == 6 + told


def test_the_ceiling_is_the_score_of_the_references_as_they_can_be_written():
  references = ['一，二，三', '四五六七']
  written = [line.replace('，', ',') for line in references]
  found = scoring.References(['x', 'y'], references, 'zh', written).score(references)
  assert (found['bleu'], found['chrf']) == pytest.approx((100, 100))
  again = scoring.References(['x', 'y'], references, 'zh').score(written)
  assert (
    (found['best_bleu'], found['best_chrf']) == (again['bleu'], again['chrf'])
    and again['bleu'] < 90
    and again['best_bleu'] is None
  )


@pytest.mark.parametrize('count', [20, 21, 25, 100])
def test_of_many_pairs_the_best_the_worst_and_some_between_are_shown(count):
  lines = scoring.table({f'l{i:03d}-en': scores(float(i)) for i in range(count)}).splitlines()
  shown = [int(line[1:4]) for line in lines if line.startswith('l')]
  assert lines[-1] == f'mean BLEU {(count - 1) / 2:.1f} over {count} pairs (copying the source: 1.0)'
  if count == 20:
    assert shown == list(range(20))
  else:
    assert shown[:5] == list(range(count - 1, count - 6, -1)) and shown[-5:] == [4, 3, 2, 1, 0]
    assert shown == sorted(set(shown), reverse=True) and len(shown) == 14
    assert f'(14 of {count} pairs' in '\n'.join(lines)
