r"""Letters with their marks, words, and punctuation that is outside of words, in any script.

Words are those of Unicode's annex 29, as far as case and punctuation depend on them. A text is matched by its kinds,
a character for each of its own, so that plain regular expressions do.
"""

import functools
import re
import unicodedata

# Kinds: L letter, I letter that is a word of its own, N number, M mark, J format character such as a joiner,
# _ connector, Z space, P punctuation, : . , that which may be within words, both, or numbers, W wide; others S or C.
_WITHIN_WORDS = ':\u00b7\u0387\u055f\u05f4\u2027\ufe13\ufe55'  # MidLetter
_WITHIN_BOTH = "'.\u2018\u2019\u2024\ufe52"  # MidNumLet, Single_Quote
_WITHIN_NUMBERS = ',;\u037e\u0589\u060c\u060d\u066c\u07f8\ufe10\ufe14\ufe50\ufe54'  # MidNum
_OTHERS = {
  **dict.fromkeys(_WITHIN_WORDS, ':'),
  **dict.fromkeys(_WITHIN_BOTH, '.'),
  **dict.fromkeys(_WITHIN_NUMBERS, ','),
  **dict.fromkeys('\u05f3', 'L'),  # geresh of Hebrew
  **dict.fromkeys('\u0e33\u0eb3\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff', 'M'),  # vowels AM, skin tones
}
_OWN_WORD = re.compile(r'[\u2e80-\u2fdf\u3005-\u3007\u3021-\u309f\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]')
_WIDE = re.compile(r'[\u3001-\u3003\u3008-\u3011\u3014-\u301f\uff01-\uff65]')
_JAMO = re.compile(r'[\u1160-\u11ff\ud7b0-\ud7ff]')  # vowels and finals of Hangul that is written in parts

_CLUSTER = re.compile(r'.[MJ]*')
_WORD = re.compile(r'(?:L[MJ]*(?:[:.][MJ]*(?=L))?|N[MJ]*(?:[,.][MJ]*(?=N))?|_[MJ]*)+|I[MJ]*')
_SPACED = re.compile(r'(?:(?<!Z)Z++)?+(?:I[MJ]*|[^IZ]+)')
# Runs of punctuation that a word has on one side at most. A mark makes a picture of it, such as a keycap.
_OUTER = re.compile(r'(?<![LNMJ_P:.,])[P:.,]++(?!M)|(?<=[LNMJ_])[P:.,]++(?![LNMJ_])|W(?!N)|(?<!N)W')
_URL = re.compile(
  r'(?:[A-Za-z][A-Za-z0-9+.-]{0,15}://|www\.)[^\s\u3000-\u303f\uff00-\uffef]*[\w/=#~-]|(?<![\w.+-])[\w.+-]+@[\w.-]*\w'
)
_SIGN = re.compile(r'(?<!\S)[-@#§](?=\w)|(?<=\d)[%‰٪]')  # of a number or a name


def clusters(text: str) -> list[str]:
  """Characters of a text as a reader counts them: letters with their marks."""
  return [text[match.start() : match.end()] for match in _CLUSTER.finditer(_kinds(text))]


def is_letter(cluster: str) -> bool:
  """Whether a cluster is a letter with its marks."""
  return cluster[:1].isalpha()


def title(text: str) -> str:
  """Text whose words begin with a title letter, or a number, and go on in small ones."""
  parts, end = [], 0
  for match in _WORD.finditer(_kinds(text)):
    word = text[match.start() : match.end()]
    first = word[0].lower()
    parts += [text[end : match.start()], word[0].title(), word.lower()[len(first) :]]
    end = match.end()
  return ''.join([*parts, text[end:]])


def spaced(text: str) -> list[str]:
  """Words as spaces divide them, and letters that are words of their own, each after its spaces."""
  return [text[match.start() : match.end()] for match in _SPACED.finditer(_kinds(text))]


def outer_punctuation(text: str) -> list[int]:
  """Places of punctuation outside of words, numbers, addresses and names."""
  kinds = _kinds(text)
  for pattern in (_URL, _SIGN):
    for match in pattern.finditer(text):
      kinds = kinds[: match.start()] + 'L' * len(match[0]) + kinds[match.end() :]
  return [place for match in _OUTER.finditer(kinds) for place in range(*match.span())]


def _kinds(text: str) -> str:
  return ''.join(map(_kind, text))


@functools.cache
def _kind(c: str) -> str:
  category = unicodedata.category(c)
  if c in _OTHERS:
    return _OTHERS[c]
  if c.isspace():
    return 'Z'
  if category[0] in 'LN' and _OWN_WORD.match(c):
    return 'I'
  if category[0] == 'P' and _WIDE.match(c):
    return 'W'
  return 'M' if _JAMO.match(c) else {'Cf': 'J', 'Pc': '_'}.get(category, category[0])
