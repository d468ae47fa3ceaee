"""Automaton of a prefix and banned words, and requests: what text is allowed, whatever symbols spell it."""

import itertools

import pytest

from lingvo_moe.core.alignment import Alignment, Token
from lingvo_moe.core.errors import UserError
from lingvo_moe.search import automaton
from lingvo_moe.search.request import TranslationRequest

EOS = 0
PIECES = [b'', b'', *(bytes([b]) for b in b' abAB-'), b' a', b'ab', b' ab', b'ba', '\u00df'.encode(), b'\xc3', b'\x9f']


def allowed(prefix, banned):
  """Function that tells whether symbols are allowed, with the end."""
  table, begin = automaton.make(prefix, banned, PIECES, EOS)

  def go(symbols):
    state = begin
    for symbol in (*symbols, EOS):
      state = table[state, symbol] if state >= 0 else state
    return state >= 0

  return go


def spelt(symbols):
  return b''.join(PIECES[i] for i in symbols)


def test_every_spelling_of_a_banned_word_is_barred_and_no_other_word():
  go = allowed(b'', ['ab'])
  for symbols in itertools.chain(*(itertools.product(range(2, 12), repeat=n) for n in (1, 2, 3))):
    words_of = lambda text: text.decode().lower().replace('-', ' ').split(' ')
    # Nor may a symbol end where the word does.
    has_word = any('ab' in words_of(spelt(symbols[: i + 1])) for i in range(len(symbols)))
    assert go(symbols) != has_word, spelt(symbols)
  assert not allowed(b'', ['\u00df'])((13, 14)) and not allowed(b'', ['\u00df'])((12,))  # by bytes too


@pytest.mark.parametrize('banned', [['a b a', 'b'], ['ab a', 'a'], ['a ba b', 'ba', 'b a'], ['b ab ab', 'ab', 'b a']])
def test_a_word_within_the_beginning_of_a_longer_phrase_is_barred(banned):
  go = allowed(b'', banned)
  for symbols in itertools.chain(*(itertools.product(range(2, 12), repeat=n) for n in (1, 2, 3))):
    texts = [b' ' + spelt(symbols[: i + 1]).lower().replace(b'-', b' - ') + b' ' for i in range(len(symbols))]
    assert go(symbols) != any(f' {word} '.encode() in text for word in banned for text in texts), spelt(symbols)


def test_text_begins_with_the_prefix_and_may_go_on_in_its_last_word():
  go = allowed(b' ab', [])
  for symbols in itertools.chain(*(itertools.product(range(1, 12), repeat=n) for n in (1, 2, 3))):
    until = [i for i in range(len(symbols)) if len(spelt(symbols[:i])) < 3]
    assert go(symbols) == (spelt(symbols).startswith(b' ab') and all(PIECES[symbols[i]] for i in until))
  assert not allowed(b' ab ', [])((9, 8))  # a space ends the word


def is_barred_in(banned, text, pieces=None):
  """Whether an automaton bars a text that comes character by character, or in these pieces."""
  pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces or text]
  written = [b'', *pieces, '日'.encode()[:1]]  # the last is part of a letter, so that others may be
  table, state = automaton.make(b'', [banned], written, EOS)
  for symbol in (*range(1, 1 + len(pieces)), EOS):
    state = table[state, symbol] if state >= 0 else state
  return state < 0


@pytest.mark.parametrize(
  'word, text, is_found',
  [
    ('כלב', 'זה כלב.', True),  # Hebrew
    ('כלב', 'כלבים', False),
    ('كلب', 'هذا كلب', True),  # Arabic
    ('كلب', 'مكلبة', False),
    ('개', '그 개 는', True),  # Hangul
    ('개', '개미', False),
    ('가', '각', False),  # whose letters, decomposed, begin with it
    ('नमक', 'नमकीन', False),  # Devanagari
    ('狗', '热狗', True),  # without spaces between words
    ('หมา', 'เป็นหมาดำ', True),
    ('C#', 'Vitamin C', False),
    ('C#', 'In C# geschrieben', True),
    ('C', 'Vitamin C.', True),
    ('.NET', 'net', False),
    ('C++', 'C', False),
    ('R&D', 'R D', False),
    ('café', 'cafe\u0301', True),  # composed or not
    ('cafe\u0301', 'CAFÉ', True),
    ('café', 'cafe', False),
    ('Zucker', 'Zuk\xadker Zu\xadcker', True),  # soft hyphen
    ('Straße', 'STRASSE', True),
    ('strasse', 'Straße', True),
    ('ΟΔΟΣ', 'η οδός οδος', True),  # final sigma
    ('ılık', 'ILIK', True),  # Turkish
    ('istanbul', 'İSTANBUL', True),
    ('homme', "l'homme", True),
    ('Hund', '„Hund“', True),
  ],
)
def test_words_are_those_of_unicode_casefolded_and_composed_alike(word, text, is_found):
  """Kind: what is a letter, a word and the same letter, in other scripts than Latin and German's."""
  assert automaton.occurs(word, text) == automaton.is_barred(word, text) == is_found
  # Nor may a symbol end where a word does; so longer words come in other symbols.
  assert is_barred_in(word, text, [text]) == is_found


def test_numbers_in_numbers_and_phrases_over_lines_in_a_source():
  assert not automaton.occurs('3', '3.14') and not automaton.occurs('1', '1,000') and automaton.occurs('3', '3, 4')
  assert automaton.occurs('New York', 'in New\n York')


@pytest.mark.parametrize(
  'text', ['Straße', 'STRAẞE', 'ÉTÉ', 'été', 'ДОМ', '热狗', 'ΟΔΟΣ', 'ﬁt', '각', 'e\u0301', 'ñÑñ']
)
def test_a_banned_word_is_barred_in_any_case_by_the_bytes_of_its_letters(text):
  pieces = [bytes([byte]) for byte in text.encode()]
  for banned in (text, text.lower(), text.upper()):
    assert is_barred_in(banned, text) and is_barred_in(banned, text, pieces), banned
    assert is_barred_in(banned, text, [b'x ', *pieces, b' x']), banned
    mixed = [text[0].encode(), *(bytes([byte]) for byte in text[1:].encode())]
    assert is_barred_in(banned, text, mixed) and not is_barred_in(f'{banned}x', text, pieces), banned
  other = 'Öl und Erdäpfel'
  assert not is_barred_in(text, other, [bytes([byte]) for byte in other.encode()])


def test_several_words_with_like_letters_are_barred_by_their_bytes():
  words = ['été', 'étui', 'tü', '热狗', '狗熊', 'ð ñ', 'ñ é']
  pieces = [bytes([byte]) for byte in sorted({*' '.join(words).encode(), *b'x'})]
  table, begin = automaton.make(b'', words, [b'', *pieces], EOS)
  for text in (
    'été',
    'x étui',
    'xx tü',
    'x热狗',
    '狗熊',
    'ð ñ é',
    'x ñ é',
    'é ñ é',
    'étu',
    'étéx',
    'xtü',
    '狗',
    'ð xñ',
  ):
    state = begin
    for symbol in (*(1 + pieces.index(bytes([byte])) for byte in text.encode()), EOS):
      state = table[state, symbol] if state >= 0 else state
    # By single bytes a word is barred where it begins a longer one too.
    assert (state < 0) == any(word in text if word[0] > '\u2000' else f' {word}' in f' {text}' for word in words), text


def test_words_without_case_are_found_within_others():
  assert automaton.occurs('\u72d7', '\u70ed\u72d7') and not automaton.occurs('hound', 'greyhound')
  assert automaton.occurs('Hund', 'Der \u201eHUND\u201c.')


def test_a_request_takes_terms_in_several_forms_and_refuses_what_is_none():
  request = TranslationRequest(terms={'Hund': 'hound'})
  assert request == TranslationRequest(terms=['Hund=hound']) == TranslationRequest(terms=(('Hund', 'hound'),))
  assert request.asked == ['terms'] and hash(request)
  for wrong in ({'prefix': 1}, {'ban': 7}, {'ban': ['']}, {'terms': ['Hund']}, {'terms': 3}):
    with pytest.raises(UserError, match='such as'):
      TranslationRequest(**wrong)
  with pytest.raises(UserError, match='must agree'):
    TranslationRequest(ban=['hound'], terms={'Hund': 'Grey Hound'})
  with pytest.raises(UserError, match='closest: prefix'):
    TranslationRequest.of(prefiks='a')


def test_alignments_of_sentences_join_to_that_of_the_text():
  one = Alignment([Token('a', 0, 1)], [Token('b', 0, 1), Token('c', 1, 2)], [(0, 0), (0, 1)])
  both = Alignment.joined([(one, 0, 0), (one, 3, 4)])
  assert both.source == [Token('a', 0, 1), Token('a', 3, 4)] and both.target[2:] == [Token('b', 4, 5), Token('c', 5, 6)]
  assert both.pharaoh == '0-0 0-1 1-2 1-3' and one.columns == ['a', 'b c', '0-0 0-1']


def test_vowel_signs_and_accents_are_parts_of_words():
  ki, ka = '\u0915\u0940', '\u0915\u093e'
  assert automaton.occurs(ki, f'x {ki} x') and not automaton.occurs(ki, f'x {ka} x')
  assert not automaton.occurs('na', 'nai\u0308ve')


@pytest.mark.parametrize('asked', [{'ban': ['%']}, {'terms': {'...': 'dots'}}])
def test_a_word_to_look_for_without_a_letter_is_refused(asked):
  with pytest.raises(UserError, match='has a letter or a digit'):
    TranslationRequest(**asked)


def test_a_table_that_is_too_large_is_refused_before_it_is_made():
  with pytest.raises(UserError, match='at most 67108 bytes'):
    automaton.make(b'', [f'word{i}' for i in range(10_000)], [b'a'] * 1000, 2)
