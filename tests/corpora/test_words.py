"""Letters with their marks, words and punctuation outside of words, in many scripts."""

import time
import unicodedata

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_moe.corpora import words
from lingvo_moe.inputs import noise

# By script: letters, and marks that follow them.
SCRIPTS = {
  'Latin': ('abcdEFGßøİıǆŉ', '\u0301\u0308\u0327'),
  'Greek': ('αβγΔΣω', '\u0301\u0342'),
  'Cyrillic': ('абвЁЖя', '\u0306'),
  'Armenian': ('աբգԴԵև', ''),
  'Georgian': ('აბგᲐ', ''),
  'Hebrew': ('אבגםצ', '\u05b0\u05b8\u05bc'),
  'Arabic': ('ابتمی', '\u064b\u0651\u200c'),
  'Devanagari': ('हकषनम', '\u0948\u0902\u094d\u093f'),
  'Tamil': ('கசதந', '\u0bbf\u0bcd'),
  'Thai': ('กขสวเ', '\u0e31\u0e48\u0e49\u0e33'),
  'Khmer': ('កខគ', '\u17d2\u17c1\u17b6'),
  'Myanmar': ('ကခမ', '\u1039\u103a\u102c'),
  'Tibetan': ('ཀཁབ', '\u0f72\u0fb1'),
  'Jamo': ('\u1100\u1102', '\u1161\u11a8'),
}
OUTSIDE = ['.', ',', '!', '?', '...', '"', '(', '»', ' – ', '।', '؟', '、', '。', ';', ':', '፡', "'"]
WITHIN = ["'", '’', '.', '-', '·']


@st.composite
def words_of(draw, script):
  letters, marks = SCRIPTS[script]
  letter = st.tuples(st.sampled_from(letters), st.text(marks, max_size=2) if marks else st.just('')).map(''.join)
  parts = draw(st.lists(st.lists(letter, min_size=1, max_size=4).map(''.join), min_size=1, max_size=2))
  return draw(st.sampled_from(WITHIN)).join(parts)


NUMBERS = st.sampled_from(['7', '3.14', '1,000', '١٬٢', '-5', '20%', '12:30', '1st', '3/4'])
LINKS = st.sampled_from(['https://x.org/a-b?q=1', 'www.x.de/', 'a.b@x.org', '#tag', '@name'])
WORDS = st.one_of(*map(words_of, SCRIPTS), NUMBERS, LINKS)
SENTENCES = st.lists(st.tuples(WORDS, st.sampled_from(['', *OUTSIDE])), min_size=1, max_size=6)


def clusters_by_loop(text):
  found = []
  for c in text:
    is_mark = unicodedata.category(c) in ('Mn', 'Mc', 'Me', 'Cf') or c in '\u1161\u11a8\u0e33'
    found[-1:] = [found[-1] + c] if found and is_mark else [*found[-1:], c]
  return found


def is_within(small, large):
  rest = iter(large)
  return all(c in rest for c in small)


@hypothesis.given(SENTENCES)
def test_without_its_punctuation_a_sentence_is_its_words(parts):
  sentence = ' '.join(f'{word}{after}' for word, after in parts)
  left = {noise.add('punctuation', sentence, 'x', key)[0] for key in range(8)}
  *most, (last, after) = parts
  last_removed = ' '.join([*(f'{w}{a}' for w, a in most), last])
  assert {' '.join(text.split()) for text in left} <= {
    ' '.join(word for word, _ in parts),
    ' '.join(last_removed.split()) if after.strip() != '–' else ' '.join(f'{last_removed} '.split()),
  }


@hypothesis.given(SENTENCES, st.integers(0, 10**6))
def test_marks_stay_with_their_letters(parts, key):
  sentence = ' '.join(f'{word}{after}' for word, after in parts)
  before = clusters_by_loop(sentence)
  assert words.clusters(sentence) == before
  after = {kind: clusters_by_loop(noise.add(kind, sentence, 'x', key)[0]) for kind in noise.KINDS}
  assert {*after['typos']} <= {*before}
  assert is_within(after['punctuation'], before) and is_within(after['words'], before)
  removed = [c for c in before if before.count(c) > after['punctuation'].count(c)]
  assert all(unicodedata.category(c[0])[0] == 'P' for c in removed)


@pytest.mark.parametrize(
  'text, expected',
  [
    ("don't l'homme 1st o’neil", "Don't L'homme 1st O’neil"),
    ('DIE ÄPFEL: ǆep straße-OST ΟΔΟΣ', 'Die Äpfel: ǅep Straße-Ost Οδος'),
    ('aujourd\u2019HUI i\u0307x ﬁx 3d u.s.a.', 'Aujourd\u2019hui I\u0307x Fix 3d U.s.a.'),
    ('2,5km _x é\u0301T है ABC中d', '2,5km _x É\u0301t है Abc中D'),
    ('', ''),
  ],
)
def test_title_case_is_of_words_as_unicode_has_them(text, expected):
  assert words.title(text) == expected


@pytest.mark.parametrize(
  'text, language, titled, capitals, small',
  [
    ('ilk ışık İŞ', 'tr', 'İlk Işık İş', 'İLK IŞIK İŞ', 'ilk ışık iş'),
    ('ILIK I\u0307L', 'aze_Latn', 'Ilık İl', 'ILIK I\u0307L', 'ılık il'),
    ('ilk iş', 'de', 'Ilk Iş', 'ILK IŞ', 'ilk iş'),
    ('გამარჯობა Გ', 'ka', 'გამარჯობა გ', 'გამარჯობა Გ', 'გამარჯობა გ'),  # no title case, no capitals
    ('ὀδός Straße', '', 'Ὀδός Straße', 'ὈΔΌΣ STRASSE', 'ὀδός straße'),
    ('ΑΣ ΟΔΟΣ', 'el', 'Ας Οδος', 'ΑΣ ΟΔΟΣ', 'ας οδος'),
    ('שלום 你好', 'he', 'שלום 你好', 'שלום 你好', 'שלום 你好'),
  ],
)
def test_case_is_that_of_a_language_and_a_script(text, language, titled, capitals, small):
  """Kind: rules of case that are a script's or a language's own."""
  assert words.title(text, language) == titled
  assert (words.upper(text, language), words.lower(text, language)) == (capitals, small)
  made = {noise.add('case', text, text, key, (language, language)) for key in range(30)}
  assert made == {(capitals, capitals), (titled, titled), (small, text)}


@hypothesis.given(SENTENCES)
def test_title_case_changes_case_alone_and_each_word_by_itself(parts):
  sentence = ' '.join(f'{word}{after}' for word, after in parts)
  fold = lambda text: unicodedata.normalize('NFC', text.casefold())
  assert fold(words.title(sentence)) == fold(sentence)
  assert words.title(sentence).split(' ') == [words.title(word) for word in sentence.split(' ')]


@pytest.mark.parametrize(
  'text, left',
  [
    ('है, नहीं।', 'है नहीं'),
    ('«Отлично», сказал он…', 'Отлично сказал он'),
    ('你好，世界！１，０００元。', '你好世界１，０００元'),
    ('你好,世界!', '你好世界'),
    ('ジョン・スミス、「はい」。', 'ジョン・スミスはい'),
    ('שָׁלוֹם! רח׳, צ׳ק ארה״ב', 'שָׁלוֹם רח׳ צ׳ק ארה״ב'),
    ("rock 'n' roll (well-known), don't.", "rock n roll well-known don't"),
    ('see https://x.org/a?b=1. or a.b@c.de!', 'see https://x.org/a?b=1 or a.b@c.de'),
    ('-5% of 3.14, $7 + #tag @me 1️⃣ #️⃣', '-5% of 3.14 $7 + #tag @me 1️⃣ #️⃣'),
    ('a_b __init__ x--y', 'a_b __init__ x--y'),
    ('…', ''),
  ],
)
def test_punctuation_outside_of_words_alone_is_removed(text, left):
  places = words.outer_punctuation(text)
  assert ''.join(c for i, c in enumerate(text) if i not in places) == left


def test_words_without_spaces_are_letters():
  assert words.spaced('wir 中国。ひと a-b!') == ['wir', ' 中', '国', '。', 'ひ', 'と', ' a-b!']


@pytest.mark.parametrize('text', ['!' * 40000 + 'a', 'a' + '-' * 40000 + 'b', 'a.' * 20000, 'a' * 40000, '@' * 40000])
def test_long_runs_take_linear_time(text):
  begin = time.process_time()
  words.outer_punctuation(text)
  words.title(text)
  assert time.process_time() - begin < 2  # of quadratic time, minutes
