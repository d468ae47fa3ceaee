"""Automaton of a prefix and banned words, and requests: what text is allowed, whatever symbols spell it."""

import itertools

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.text import automaton
from lingvo_moe.text.alignment import Alignment, Token
from lingvo_moe.text.request import TranslationRequest

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
    texts = [b' ' + spelt(symbols[: i + 1]).lower().replace(b'-', b' ') + b' ' for i in range(len(symbols))]
    assert go(symbols) != any(f' {word} '.encode() in text for word in banned for text in texts), spelt(symbols)


def test_text_begins_with_the_prefix_and_may_go_on_in_its_last_word():
  go = allowed(b' ab', [])
  for symbols in itertools.chain(*(itertools.product(range(1, 12), repeat=n) for n in (1, 2, 3))):
    until = [i for i in range(len(symbols)) if len(spelt(symbols[:i])) < 3]
    assert go(symbols) == (spelt(symbols).startswith(b' ab') and all(PIECES[symbols[i]] for i in until))
  assert not allowed(b' ab ', [])((9, 8))  # a space ends the word


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
