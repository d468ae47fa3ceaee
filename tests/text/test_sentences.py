"""Paragraphs: what is split, how translations are joined, and what is cut."""

import random
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_moe.core.alignment import Alignment, Token
from lingvo_moe.core.errors import UserError
from lingvo_moe.search.request import TranslationRequest
from lingvo_moe.text import sentences
from lingvo_moe.text.sentences import TrainingLines
from lingvo_moe.text.translator import Answers, Hypothesis, Translator

ONE_EACH, MANY = TrainingLines(0.02, 120.0), TrainingLines(0.4, 60.0)


class Capitals(Translator):
  """Translates to capitals; the k-th of two hypotheses has k quotes and the score -k. Reads 40 bytes of a text.

  U+FFFD has no token.
  """

  def __init__(self, n_best=1):
    self.n_best, self.seen = n_best, []

  def translate(self, texts, target=None, progress=lambda count: None, known=(), keep=lambda i, hypotheses: None):
    self.seen = [text for i, text in enumerate(texts) if i not in known]
    found = [
      [Hypothesis(text.upper() + "'" * k, -float(k), -2.0 * k) for k in range(self.n_best)] if text else [EMPTY]
      for text in texts
    ]
    for i, text in enumerate(texts):
      if text not in ('', '\ufffd') and i not in known:
        keep(i, found[i])
    return Answers(found, self.too_long(texts))

  def too_long(self, texts, target=None):
    return [i for i, text in enumerate(texts) if len(text.encode()) > 40]


EMPTY = Hypothesis('', 0.0, 0.0)


def translated(text, language='de', mode='auto', lines=ONE_EACH, **known):
  translator = Capitals()
  answers = sentences.Paragraphs(translator, mode, lines, 40).translate([text], None, [language], **known)
  return answers.hypotheses[0][0].text, translator.seen, answers


@pytest.mark.parametrize(
  'language, text, parts',
  [
    ('de', 'Ein Hund. Zwei Hunde.', ['Ein Hund.', 'Zwei Hunde.']),
    ('deu', 'Am 1. Januar z. B. kam Dr. Maier. Er ging.', ['Am 1. Januar z. B. kam Dr. Maier.', 'Er ging.']),
    ('zh', '我喜欢猫。你呢？', ['我喜欢猫。', '你呢？']),
    ('gof', 'Hello there. And you?', ['Hello there.', 'And you?']),
    ('', 'One? Two!', ['One?', 'Two!']),
    ('de', 'Ein Hund  läuft', ['Ein Hund  läuft']),
    ('en', 'Take vitamin C\xa0. It helps.', ['Take vitamin C\xa0.', 'It helps.']),
  ],
)
def test_sentences_of_a_line_are_found_by_language_and_together_are_the_line(language, text, parts):
  found = sentences.sentences(text, language)
  assert [part.strip() for part in found] == parts and ''.join(found) == text


def test_translations_are_joined_as_the_text_stood():
  text = '\n  Ein Hund. Zwei  Hunde.\n\n- Drei?  Vier!\n'
  found, seen, _ = translated(text)
  assert seen == ['Ein Hund.', 'Zwei  Hunde.', '- Drei?', 'Vier!'] and found == text.upper()
  assert translated('你好。再见。', 'zh')[0] == '你好。再见。'  # no space where the language has none
  for same in ('', '  ', ' Ein Hund ', '\n'):
    assert translated(same)[1] == [same]  # as without splitting


@pytest.mark.parametrize('task', ['translate English to German: ', '<2de> '])
def test_the_task_that_a_text_begins_with_is_before_each_of_its_parts(task):
  """Kind: text for the model, as T5 and MADLAD-400 read it, that holds for all sentences."""
  text = task + 'A dog runs. Two dogs sleep.\nYes.'
  translator = Capitals()
  paragraphs = sentences.Paragraphs(translator, 'auto', ONE_EACH, 100)
  [[h]] = paragraphs.translate([text], None, ['en']).hypotheses
  assert translator.seen == [f'{task}A dog runs.', f'{task}Two dogs sleep.', f'{task}Yes.']
  assert paragraphs.plan(
    [f'{task}Yes.', task, 'Translate it to German: One dog. Two dogs.'], None, ['en'] * 3
  ).parts == [*(f'{task}Yes.', task, 'Translate it to German: One dog.', 'Two dogs.')]
  sentences.Paragraphs(translator, 'auto', ONE_EACH, 40).translate([task + 'one two three four five six'], None, ['en'])
  assert all(part.startswith(task) and len(part) <= 40 for part in translator.seen)


def test_alignments_of_a_text_with_a_task_have_its_places():
  text = '<2x> Ja. So.'
  arranged = sentences.Paragraphs(Capitals(), 'always', ONE_EACH, 40).plan([text], None, ['en']).arranged[0]
  hypotheses = []
  for part in arranged.parts:
    tokens = [Token(part[:4], 0, 4), Token(part[5:], 5, 8)]
    alignment = Alignment(tokens, [Token('yes', 0, 3)], [(0, 0), (1, 0)])
    hypotheses.append([Hypothesis('yes', 0.0, 0.0, alignment)])
  [h] = arranged.joined(hypotheses)
  assert [text[t.begin : t.end] for t in h.alignment.source] == ['<2x>', 'Ja.', 'So.']
  assert h.text == 'yes yes' and h.alignment.points == [(0, 0), (1, 0), (2, 1)]


def test_a_space_is_that_of_the_language_of_the_translation():
  assert sentences._glued('Hello.', '', 'Bye.') == 'Hello. Bye.'
  assert sentences._glued('你好。', ' ', '再见。') == '你好。再见。'
  assert sentences._glued('你好。', '\n\n', '再见。') == '你好。\n\n再见。'
  assert sentences._glued('Hello.', '  ', '') == 'Hello.'


def test_lines_are_split_by_what_training_lines_were():
  short, long = 'Eins. Zwei.', 'Das ist ein Satz mit Worten. ' * 3
  whole = [short]
  assert translated(short)[1] == ['Eins.', 'Zwei.'] == translated(short, lines=TrainingLines())[1]
  assert translated(short, lines=MANY)[1] == whole == translated(short, mode='never')[1]
  assert translated(short, lines=MANY, mode='always')[1] == ['Eins.', 'Zwei.']
  assert translated(long, lines=MANY)[1] == ['Das ist ein Satz mit Worten.'] * 3
  assert translated('Eins.\nZwei.', lines=MANY)[1] == ['Eins.', 'Zwei.']
  with pytest.raises(UserError, match="split_sentences must be one of auto, always, never; saw 'no'"):
    translated(short, mode='no')


def test_training_lines_are_measured():
  lines = [('de', 'Eins.')] * 97 + [('de', 'Eins. Zwei.')] * 3
  assert TrainingLines.of(lines) == (0.03, 11.0) and TrainingLines.of([]) == (None, None)


def test_a_sentence_over_the_length_is_cut_at_a_clause_and_all_of_it_is_translated():
  text = 'Als der Hund kam, ging die Katze, und der Vogel sang lange.'
  found, seen, answers = translated(text)
  assert seen == ['Als der Hund kam, ging die Katze,', 'und der Vogel sang lange.'] and found == text.upper()
  assert (answers.truncated, list(answers.cut)) == ([], [0])
  assert list(answers.notices('over 40 tokens')) == [
    (0, 'has a sentence over 40 tokens, which was cut where a clause ends')
  ]
  assert translated(text, mode='never')[2].truncated == [0]
  text = 'Der Hund, der kam, ging. Die Katze, die sang, blieb.'
  assert translated(text, lines=MANY)[1] == ['Der Hund, der kam, ging.', 'Die Katze, die sang, blieb.']
  found, seen, _ = translated('x' * 90)
  assert ''.join(seen) == 'x' * 90 and max(map(len, seen)) <= 40  # no clause and no word ends there


def test_a_cut_is_near_the_middle_and_bytes_are_counted():
  assert sentences._halves('Ja, eins zwei drei vier.') == ['Ja, eins zwei ', 'drei vier.']  # not behind the comma
  assert sentences._halves('Ja eins, zwei drei vier.') == ['Ja eins, ', 'zwei drei vier.']
  assert sentences._halves('ab') == ['a', 'b'] and sentences._halves('Aa. b, c') == ['Aa. ', 'b, c']
  text = '猫' * 15 + '，' + '狗' * 5  # 21 characters and 63 bytes, of which 40 are read
  found, seen, answers = translated(text, 'zh')
  assert found == text and ''.join(seen) == text and len(seen) > 1 and list(answers.cut) == [0]


def test_hypotheses_of_a_text_are_the_best_combinations():
  paragraphs = sentences.Paragraphs(Capitals(n_best=3), 'auto', ONE_EACH, 40)
  [found] = paragraphs.translate(['One. Two.'], None, ['en']).hypotheses
  assert [h.text for h in found] == ['ONE. TWO.', "ONE. TWO.'", "ONE.' TWO."]
  assert [(h.score, h.log_prob) for h in found] == [(0.0, 0.0), (-1.0, -2.0), (-1.0, -2.0)]


WORDS = ['', 'Ja.', 'nein', '好。', 'ß', ' x']


def one_part_after_another(parts, spaces, sides, are_samples):
  """Texts, scores, log-probabilities, and places of the tokens, by joining two texts at a time."""
  most, found = max(map(len, sides)), []
  for k, of_part in enumerate(sides):
    begin = len(''.join(spaces[: k + 1]) + ''.join(parts[:k]))

    def after(before, own, k=k, begin=begin):
      text, score, log_prob, places = before
      text = sentences._glued(text, spaces[k], own.text)
      return text, score + own.score, log_prob + own.log_prob, [*places, (begin, len(text) - len(own.text))]

    if not k:
      found = [after(('', 0.0, 0.0, []), own) for own in of_part]
    elif are_samples:
      found = [after(a, own) for a, own in zip(found, of_part)]
    else:
      found = sorted([after(a, own) for a in found for own in of_part], key=lambda f: -f[1])[:most]
  return [(sentences._glued(text, spaces[-1], ''), *rest) for text, *rest in found]


PART = st.lists(
  st.tuples(st.integers(-3, 0), st.sampled_from(['', 'Ja.', 'nein', '好。', ' x'])), min_size=1, max_size=3
)


@hypothesis.given(st.lists(PART, min_size=1, max_size=4), st.lists(st.sampled_from(['', ' ', ' \n'])), st.booleans())
def test_joined_hypotheses_are_those_of_joining_one_part_after_another(hypotheses, spaces, are_samples):
  parts, spaces = (
    ['p' * (i + 1) for i in range(len(hypotheses))],
    [*spaces, '', ' ', '\n', '', ''][: len(hypotheses) + 1],
  )
  one = lambda text: Alignment([Token('s', 0, 1)], [Token('t', 0, len(text))], [(0, 0)])
  make = lambda score, text: Hypothesis(text, float(score), 2.0 * score, one(text))
  sides = [[make(*own) for own in sorted(of_part, reverse=True)] for of_part in hypotheses]
  found = sentences._Arranged(parts, spaces).joined(sides, are_samples)
  begins = lambda a: [(source.begin, target.begin) for source, target in zip(a.source, a.target)]
  got = [(h.text, h.score, h.log_prob, begins(h.alignment)) for h in found]
  assert got == one_part_after_another(parts, spaces, sides, are_samples)


def test_a_line_break_before_an_empty_translation_is_what_the_next_one_follows():
  own = lambda text: [Hypothesis(text, 0.0, 0.0)]
  arranged = sentences._Arranged(['a', 'b', 'c'], ['\n', ' ', ' ', ''])
  assert arranged.joined([own(''), own('Ja.'), own('')])[0].text == '\n Ja.'
  assert arranged.joined([own('好'), own(''), own('Ja.')])[0].text == '\n好Ja.'


def test_a_text_of_many_sentences_is_joined_in_linear_time():
  count, best = 10_000, [Hypothesis('w' * 50, -float(k), 0.0) for k in range(4)]
  begin = time.process_time()
  found = sentences._Arranged(['x'] * count, [' '] * (count + 1)).joined([best] * count)
  assert len(found) == 4 and len(found[0].text) == 51 * count - 1
  assert time.process_time() - begin < 5  # it was two minutes


def test_a_text_is_kept_when_all_its_sentences_are_done_and_a_known_one_is_left_out():
  texts, kept, counts = ['Eins. Zwei.', '', 'Drei.', 'Vier. Fünf.', 'Sechs.\n\ufffd'], {}, []
  translator = Capitals()
  answers = sentences.Paragraphs(translator, 'auto', ONE_EACH, 40).translate(
    texts, None, ['de'] * 5, counts.append, {3}, lambda i, hypotheses: kept.update({i: hypotheses[0].text})
  )
  assert kept == {0: 'EINS. ZWEI.', 2: 'DREI.', 4: 'SECHS.\n\ufffd'} and sum(counts) == 4
  assert translator.seen == ['Eins.', 'Zwei.', '', 'Drei.', 'Sechs.', '\ufffd'] and len(answers.hypotheses) == 5


def test_a_plan_has_the_parts_of_each_text_and_joins_what_is_translated_elsewhere():
  texts = ['Eins. Zwei.', '', 'Als der Hund kam, ging die Katze, und der Vogel sang lange.', 'x']
  paragraphs = sentences.Paragraphs(Capitals(), 'auto', ONE_EACH, 40)
  plan = paragraphs.plan(texts, None, ['de'] * 4)
  assert plan.parts[:3] == ['Eins.', 'Zwei.', ''] and plan.ends == [2, 3, 5, 6]
  answers = Answers([[Hypothesis(part.upper(), 0.0, 0.0)] for part in plan.parts], [1, 5])
  joined = plan.joined(answers)
  assert [h.text for (h,) in joined.hypotheses] == [text.upper() for text in texts]
  assert (joined.truncated, joined.cut) == ([0, 3], [2])
  whole = sentences.Paragraphs(Capitals(), 'never', ONE_EACH, 40).plan([' a. b.\n'], None, ['de'])
  assert whole.parts == [' a. b.\n'] and whole.joined(Answers([[Hypothesis('x ', 1.0, 2.0)]], [])).hypotheses == [
    [Hypothesis('x ', 1.0, 2.0)]
  ]
  prefixed = paragraphs.plan(['Eins. Zwei.'], None, ['de'], TranslationRequest(prefix='A'))
  assert prefixed.parts == ['Eins. Zwei.']


def test_any_text_comes_back_whole():
  rng = random.Random(0)
  for _ in range(500):
    text = ''.join(
      rng.choices(['Wort ', 'A. ', '。', '\n', ' ', 'ß', '?', '! ', ', ', '\u200b', '1. '], k=rng.randint(0, 40))
    )
    pieces = [piece for line in sentences._LINES.findall(text) for piece in sentences.sentences(line, 'de')]
    assert ''.join(pieces) == text
    arranged = sentences._Arranged.of(text, pieces)
    if arranged.parts != [text]:
      both = [s for pair in zip(arranged.spaces, [*arranged.parts, '']) for s in pair]
      assert ''.join(both) == text


def test_tokens_of_a_joined_alignment_have_their_places_in_the_text():
  one = Hypothesis('A', 0.0, 0.0, Alignment([Token('s', 0, 1)], [Token('t', 0, 1)], [(0, 0)]))
  [found] = sentences._Arranged(['ab', 'c'], [' ', '  ', '']).joined([[one], [one]])
  assert [token.begin for token in found.alignment.source] == [1, 5]
  assert found.text == 'A  A' and [token.begin for token in found.alignment.target] == [0, 3]
