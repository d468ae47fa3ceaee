"""Placeholders: what is one in interface strings and what is none in prose; how a translator keeps them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.addons.documents.formats import HTML
from lingvo_moe.addons.documents.markup import MarkedUp
from lingvo_moe.core.alignment import Alignment, Token
from lingvo_moe.search.request import TranslationRequest
from lingvo_moe.text import placeholders, sentences
from lingvo_moe.text.inline_placement import Aligned
from lingvo_moe.text.placeholder_keeper import PlaceholderKeeper
from lingvo_moe.text.translator import Answers, Hypothesis, Translator

STRINGS = {
  'URL': [
    *('Siehe <https://a.org/x?q=1&b=2>.', '(<http://a.org>)', 'Besuchen Sie <www.beispiel.de/hilfe>!'),
    *(
      '请访问<https://example.org>获取。',
      '<https://de.wikipedia.org/wiki/Köln>, 1',
      '<www.a.kr/b>에서',
      'href="<http://a.org>"',
    ),
  ],
  'e-mail address': [
    'Schreiben Sie an <max.m+x@mail.example.org>.',
    '<a@b.cz>, prosím',
    '发送到<a@b.org>获取',
    '<ü@b.de>로',
  ],
  '{{name}}': ['Hallo <{{name}}>!', '<{{ user.name }}> a écrit', '<{{{raw}}}>'],
  '${x}': ['Il reste <${days}> jours', '<${a}><${b}>'],
  '%{count}': ['Zbývá <%{count}> dní', '<#{name}>'],
  '{0}': [
    '<{0}> von <{1}>',
    '<{}>',
    '<{name!r:>10}>',
    'Preis: <{price:.2f}>',
    '<{items[0]}>',
    '<{0,number}> €',
    '<{ n }>일 전',
  ],
  '%(name)s': ['<%(name)s> und <%(count)d>', '<%(price).2f> EUR'],
  '%1$s': ['<%1$s> sur <%2$d>', 'Soubor <%1$s><%2$s>', '<%1$s>hier weiter<%2$s>'],
  '%s': [
    '<%s>log',
    'a<%d>heures',
    '第<%d>页',
    '<%s> files',
    '<%d><%%>',
    'Hi <%@>!',
    '<%02d>:<%02d>',
    '<%.2f> km',
    '<%ld>',
    'noch <%d>px',
    'je <%s>',
  ],
  '%1': ['第<%1>页', '<%n>개', '<%1> de <%2>', '<%n> Dateien', '<%L1>'],
  '$1': ['共<$1>个', '<$1> und <$2>.', 'Bonjour <$1>, ça va ?'],
  ':name': ['Willkommen, <:name>!', '<:count> Dateien', '(<:name>)', 'Smutný <:sad_face:>'],
}
PROSE = """Um 10:30 Uhr: müde.|foo: bar|a::b|std::vector|::|Prix : 5 €|Die Antwort: ja.|:)|:p|:-D|Achtung:wichtig|1:1
Ratio 3:2|$1,000|$15|$1.50|$5M|$5 million|US$1|100 $|5$|100% sure|% s|100 % sicher|100%ige Ruhe|50 %der Leute|50%off
50 % des gens|20% deposit|%age of users|5 % de|{see below}|{ a, b }|f(x) = {1, 2}|x@y|@user|C:\\Users|e.g. www
Psalm 3:16|50%|Dvacet % lidí|百分之5%。|a{b|{}}{|100％|$5万|%change|20%of it|{n, see below}|{number, of}""".replace(
  '\n', '|'
).split('|')


@pytest.mark.parametrize(('kind', 'marked'), [(kind, text) for kind, texts in STRINGS.items() for text in texts])
def test_placeholders_of_each_kind_are_found(kind, marked):
  text, expected = '', []
  for part in re.split(r'(<[^<]+>)', marked):
    if part.startswith('<'):
      expected.append((len(text), len(text) + len(part) - 2))
    text += part.strip('<>')
  assert placeholders.find(text) == expected
  assert any(re.fullmatch(placeholders.KINDS[kind], text[begin:end]) for begin, end in expected) or kind[0] in '%:$U'


def test_every_kind_has_a_string_here():
  assert STRINGS.keys() == placeholders.KINDS.keys()


@pytest.mark.parametrize(
  'marked',
  [
    '<{n, plural, one {# fichier} other {# fichiers}}> restants',
    '<{g, select, male {{n, plural, =0 {er} other {er {a} {b, date}}}} other {sie}}> und <{n}>',
    'Preis <{price, number, currency}>, am <{d, date, short}> um <{ t , time }>Uhr',
    "<{n, plural, other {'{' # it''s}}> x '<{a}>' x",
    '{ x <{n, number, ::currency/EUR}>} y',
    '{a, plural, one <{x}> <{b, number}> ',
  ],
)
def test_arguments_of_icu_are_found_by_their_grammar(marked):
  parts = re.split(r'[<>]', marked)
  text = ''.join(parts)
  assert [text[begin:end] for begin, end in placeholders.find(text)] == parts[1::2]


@pytest.mark.parametrize('text', PROSE)
def test_prose_has_no_placeholders(text):
  assert [text[begin:end] for begin, end in placeholders.find(text)] in ([], ['{}'])


@pytest.mark.parametrize(
  ('text', 'carried'),
  [
    ('„{name}“ löschen?', ['„{name}“']),
    ('({count})', ['({count})']),
    ("{{name}}'s photos", ['{{name}}']),
    ('{1}hier{2}', ['{1}', '{2}']),
    ('%1$sHier weiter%2$s', ['%1$s', '%2$s']),
    ('{n}일 전', ['{n}']),
    ('{a}、{b}', ['{a}', '{b}']),
    ('{host}:{port}', ['{host}:{port}']),
    ('file_{id}.txt, x', ['_{id}']),
    ('你好{{name}}！', ['{{name}}']),
    ('100%% sicher: %d.', ['100%%', '%d']),
    ('x {a} {b}!', ['{a}', '{b}']),
  ],
)
def test_signs_beside_a_placeholder_are_carried_with_it_and_words_are_not(text, carried):
  assert [text[begin:end] for begin, end in placeholders.with_what_is_beside(text)] == carried


class Words(Translator):
  """Translates word for word, by a dictionary, with alignments if it is able to; in the other order if it `turns`."""

  n_best = 1

  def __init__(self, words, able=('placeholders', 'alignments'), turns=False):
    self.words, self.able, self.turns, self.seen = words, able, turns, []

  def _spans(self, text):
    spans = [match.span() for match in re.finditer(r'\w+|[^\w\s]', text)]
    if self.turns:
      spans = [*[s for s in spans if text[s[0]].isalnum()][::-1], *[s for s in spans if not text[s[0]].isalnum()]]
    return spans

  def translate(self, texts, target=None, known=(), keep=None, request=None):
    self.seen += texts
    answers = []
    for text in texts:
      out = ''
      for begin, end in self._spans(text):
        word = self.words.get(text[begin:end], text[begin:end])
        out += ' ' * (bool(out) and word[:1].isalnum()) + word
      answers.append([Hypothesis(out, -1.0, -2.0)])
    answers = Answers(answers, [])
    return self._aligned(texts, answers, target) if request and request.alignments else answers

  def align(self, sources, targets, target=None):
    aligned = []
    for source, translation in zip(sources, targets, strict=True):
      of_source, of_target, at = [], [], 0
      for begin, end in self._spans(source):
        word = self.words.get(source[begin:end], source[begin:end])
        at = translation.index(word, at) if word else at
        of_source.append(Token(source[begin:end], begin, end))
        of_target.append(Token(word, at, at + len(word)))
        at += len(word)
      aligned.append(Alignment(of_source, of_target, [(i, i) for i in range(len(of_source))]))
    return aligned


WORDS = {'Hallo': 'Hello', 'und': 'and', 'Dateien': 'files', 'von': 'of', 'heute': 'today', 'weg': ''}


@pytest.mark.parametrize(
  ('text', 'seen', 'expected'),
  [
    ('Hallo {{name}}!', 'Hallo!', 'Hello {{name}}!'),
    ('Hallo {{name}} und {{name}}.', 'Hallo und.', 'Hello {{name}} and {{name}}.'),
    ('{{name}}, hallo', 'hallo', '{{name}}, hallo'),
    ('%d Dateien', 'Dateien', '%d files'),
    ('Dateien {1}von{2}, und', 'Dateien von, und', 'files {1}of{2}, and'),
    ('%1$sHallo Dateien%2$s', 'Hallo Dateien', '%1$sHello files%2$s'),
    ('{n}Dateien', 'Dateien', '{n}files'),
    ('Dateien: %d', 'Dateien:', 'files: %d'),
    ('Dateien von  %s  heute', 'Dateien von heute', 'files of  %s  today'),
    ('„{a}“ von {b}/{c}?', 'von?', '„{a}“ of {b}/{c}?'),
    ('Hallo', 'Hallo', 'Hello'),
    ('{{name}}', '', '{{name}}'),
    (' {a}: {b} ', '', ' {a}: {b} '),
    ('$1 - 5', '', '$1 - 5'),
  ],
)
def test_placeholders_come_back_with_the_spaces_around_them(text, seen, expected):
  translator = Words(WORDS)
  answers = PlaceholderKeeper(translator).translate([text])
  assert [translator.seen, answers.hypotheses[0][0].text, list(answers.lost)] == [[seen], expected, []]


def test_a_placeholder_goes_where_its_words_went():
  keep = lambda *arguments: PlaceholderKeeper(Words(*arguments)).translate([text]).hypotheses[0][0].text
  text, words = 'habe {n} Dateien gelöscht, {x} sagte Otto.', {'habe': 'have', 'gelöscht': 'deleted', 'sagte': 'said'}
  words |= {'Dateien': 'files'}
  assert keep(words) == 'have {n} files deleted, {x} said Otto.'
  able = ('placeholders', 'alignments')
  assert keep(words, able, True) == 'Otto {x} said deleted {n} files have,.'
  assert keep(words, able[:1]) == keep(words)


def test_alignments_refer_to_the_texts_with_placeholders():
  text = 'Hallo, {a} und {b}!'
  request = TranslationRequest(alignments=True)
  [[h]] = PlaceholderKeeper(Words(WORDS)).translate([text], request=request).hypotheses
  alignment = h.alignment
  assert h.text == 'Hello, {a} and {b}!'
  pairs = [(alignment.source[i], alignment.target[j]) for i, j in alignment.points]
  words = [(text[s.begin : s.end], h.text[t.begin : t.end]) for s, t in pairs]
  assert words == [('Hallo', 'Hello'), (',', ','), ('{a}', '{a}'), ('und', 'and'), ('{b}', '{b}'), ('!', '!')]
  [[h]] = PlaceholderKeeper(Words(WORDS)).translate(['{a}'], request=request).hypotheses
  assert h.alignment == Alignment([Token('{a}', 0, 3)], [Token('{a}', 0, 3)], [(0, 0)])


def test_inline_markup_stays_around_a_placeholder():
  document = MarkedUp('<p>Hallo <b>{{name}}</b>, <i>heute</i> %d Dateien</p>', HTML)
  request = TranslationRequest(alignments=True)
  [[h]] = PlaceholderKeeper(Words(WORDS)).translate(document.texts, request=request).hypotheses
  written = document.written([Aligned(h.text, h.alignment.links)])
  assert written == '<p>Hello <b>{{name}}</b>, <i>today</i> %d files</p>'


def test_what_a_translation_has_no_place_for_is_at_its_end_and_counted():
  answers = PlaceholderKeeper(Words(WORDS)).translate(['Hallo', 'weg {a} {b}', 'Hallo {c}'])
  assert [h.text for [h] in answers.hypotheses] == ['Hello', '{a} {b}', 'Hello {c}']
  assert list(answers.notices('')) == [(1, 'lost 2 placeholders, put back at the end of its translation')]
  plan = sentences.Plan.of_whole(['Hallo', 'weg {a} {b}', 'Hallo {c}'])
  assert plan.joined(answers).lost == [1, 1]


def test_texts_without_placeholders_reach_the_translator_as_they_are():
  translator, asked = Words(WORDS), {}
  translator.translate = lambda texts, *arguments, **more: asked.update(texts=texts, more=more) or Answers([], [])
  texts = ['Um 10:30: 50 %', 'Hallo']
  PlaceholderKeeper(translator).translate(texts, known={0}, keep=print)
  assert asked == {'texts': texts, 'more': {'known': {0}, 'keep': print}}
  assert asked['texts'] is texts


class Keeping(Words):
  """Words that hands out translations as they are made, and none of the texts that are known."""

  def translate(self, texts, target=None, known=(), keep=None, request=None):
    answers = super().translate(texts, target, known, keep, request)
    for i, hypotheses in enumerate(answers.hypotheses):
      if i in known:
        answers.hypotheses[i] = []
      else:
        keep(i, hypotheses)
    return answers


def test_a_translation_is_kept_once_with_its_placeholders_and_a_known_text_is_not_made_again():
  texts, kept = ['Hallo', 'Hallo {a}', '%d Dateien', '{b}'], []
  keep = lambda i, hypotheses: kept.append((i, [h.text for h in hypotheses]))
  answers = PlaceholderKeeper(Keeping(WORDS)).translate(texts, known={2}, keep=keep)
  assert sorted(kept) == [(0, ['Hello']), (1, ['Hello {a}']), (3, ['{b}'])]
  assert [[h.text for h in hypotheses] for hypotheses in answers.hypotheses] == [['Hello'], ['Hello {a}'], [], ['{b}']]


def test_a_sentence_does_not_end_within_a_placeholder():
  line = 'Siehe {{ a. B }} hier. Und {{ c. D }} dort.'
  assert sentences.sentences(line, 'de') == ['Siehe {{ a. B }} hier. ', 'Und {{ c. D }} dort.']


PARTS = st.sampled_from(
  [*'{a} {a} {{b}} %s $1 :c https://d.e/f „{g}“ ({h}) i Jk lm , . ! - – 你 好'.split(), ' ', '  ', '\t']
)


@given(
  st.lists(PARTS, max_size=9), st.lists(st.sampled_from(['wo', 'Rd', ',', '.', '你', 'x y']), max_size=6), st.data()
)
def test_every_placeholder_comes_back_once_whatever_the_translation_is(parts, translated, data):
  text, translation = ''.join(parts), ' '.join(translated)
  translator = Words({})
  translator.translate = lambda texts, *_, **more: Answers([[Hypothesis(translation, 0.0, 0.0)] for t in texts], [])

  def align(sources, targets, target=None):
    of = lambda text: [Token(m[0], *m.span()) for m in re.finditer(r'\S', text)]
    source, target = of(sources[0]), of(targets[0])
    number = st.integers(0, max(len(source) - 1, 0))
    points = [(data.draw(number), j) for j in range(len(target))] if source else []
    return [Alignment(source, target, points)]

  translator.align = align
  [[h]] = PlaceholderKeeper(translator).translate([text]).hypotheses
  carried = [text[begin:end] for begin, end in placeholders.with_what_is_beside(text)]
  rest = h.text
  for placeholder in sorted(carried, key=len, reverse=True):
    assert placeholder in rest
    rest = rest.replace(placeholder, ' ', 1)
  assert ''.join(translation.split()) in ''.join(rest.split()) or not any(map(str.isalpha, rest))
