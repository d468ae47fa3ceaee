"""Letters with their marks, words, their case, and punctuation that is outside of words, in any script."""

import regex

from lingvo_moe.corpora import language_id

_MARK = r'\p{M}\p{Cf}\p{Emoji_Modifier}\u0e33\u0eb3\u1160-\u11ff\ud7b0-\ud7ff'  # vowels AM, Hangul in parts
_OWN_WORD = r'\p{Han}\p{Hiragana}'  # letters that are words of their own
_WIDE = r'\u3001-\u3003\u3008-\u3011\u3014-\u301f\uff01-\uff65'
_JOINED = rf'[[\p{{L}}\p{{N}}\p{{Pc}}\u05f3{_MARK}]--[{_OWN_WORD}]]'  # with geresh of Hebrew
_PUNCTUATION = rf'[\p{{P}}--[\p{{Pc}}\u05f3{_WIDE}]]'

_CLUSTER = regex.compile(rf'(?s).[{_MARK}]*+')
_BOUNDARY = regex.compile(r'(?w)\b')  # boundaries of words, of Unicode's annex 29
_SPACED = regex.compile(rf'(?V1)(?:(?<!\s)\s++)?+(?:[{_OWN_WORD}][{_MARK}]*+|[^\s{_OWN_WORD}]++)')
# Runs of punctuation that a word has on one side at most. A mark makes a picture of it, such as a keycap.
_OUTER = regex.compile(
  rf'(?V1)(?<!{_JOINED}|{_PUNCTUATION}){_PUNCTUATION}++(?!\p{{M}})|(?<={_JOINED}){_PUNCTUATION}++(?!{_JOINED})'
  rf'|[\p{{P}}&&[{_WIDE}]](?!\p{{N}})|(?<!\p{{N}})[\p{{P}}&&[{_WIDE}]]'
)
_URL = regex.compile(
  r'(?:[A-Za-z][A-Za-z0-9+.-]{0,15}://|www\.)[^\s\u3000-\u303f\uff00-\uffef]*[\w/=#~-]|(?<![\w.+-])[\w.+-]+@[\w.-]*\w'
)
_SIGN = regex.compile(r'(?<!\S)[-@#§](?=\w)|(?<=\d)[%‰٪]')  # of a number or a name
_TURKIC = ('az', 'crh', 'gag', 'kk', 'tr', 'tt')  # languages with an i with a dot, and one without


def clusters(text: str) -> list[str]:
  """Characters of a text as a reader counts them: letters with their marks."""
  return _CLUSTER.findall(text)


def is_letter(cluster: str) -> bool:
  """Whether a cluster is a letter with its marks."""
  return cluster[:1].isalpha()


def lower(text: str, language: str = '') -> str:
  """Text in small letters, as a language has them."""
  if language_id.base(language) in _TURKIC:
    text = text.replace('I\u0307', 'i').replace('İ', 'i').replace('I', 'ı')
  return text.lower()


def upper(text: str, language: str = '') -> str:
  """Text in capitals, as a language has them. Scripts without title case, such as Georgian, stay as they are."""
  text = text.replace('i', 'İ') if language_id.base(language) in _TURKIC else text
  return ''.join(c if c.islower() and c.title() == c else c.upper() for c in text)


def title(text: str, language: str = '') -> str:
  """Text whose words begin with a title letter, or a number, and go on in small ones, as a language has them."""
  is_turkic, words, begin = language_id.base(language) in _TURKIC, [], 0
  text = text.replace('I\u0307', 'İ') if is_turkic else text
  for end in (*(match.start() for match in _BOUNDARY.finditer(text)), len(text)):
    if word := text[begin:end]:
      first, begin = lower(word[0], language), end
      head = 'İ' if is_turkic and first == 'i' else first if first.title() == first else word[0].title()
      words += [head, lower(word, language)[len(first) :]]
  return ''.join(words)


def spaced(text: str) -> list[str]:
  """Words as spaces divide them, and letters that are words of their own, each after its spaces."""
  return _SPACED.findall(text)


def outer_punctuation(text: str) -> list[int]:
  """Places of punctuation outside of words, numbers, addresses and names."""
  for pattern in (_URL, _SIGN):
    text = pattern.sub(lambda match: 'a' * len(match[0]), text)
  return [place for match in _OUTER.finditer(text) for place in range(*match.span())]
