"""Identification of a text's language by its script and py3langid (Lui and Baldwin 2012), as far as they are sure."""

import contextlib
import copy
import functools
import importlib.util
import re
from collections.abc import Collection, Iterable

import regex

_LETTERS = regex.compile(r'[^\W\d_]')
_FEW_LETTERS = 20  # fewer tell too little
_SURELY_OTHER = 1e-3  # probability of its language below which a line is in another
_OWN_SCRIPT = 0.1  # share of letters below which a line is in another script
_OWN_HAN = 0.8  # the same of Chinese, half of whose characters are both traditional and simplified
_MACROLANGUAGES = {  # members by macrolanguage of ISO 639-3, where CLDR does not count a code as it
  'ar': 'acm acq aeb ajp apc ars ary arz',
  'az': 'azb',
  'ff': 'fuv',
  'ku': 'ckb sdh',
  'lv': 'ltg',
  'no': 'nb nn',
  'ps': 'pbt',
  'qu': 'quy quz',
  'sw': 'swc',
  'uz': 'uzs',
  'zh': 'hak nan wuu yue',
}
_MACROLANGUAGE = {member: code for code, members in _MACROLANGUAGES.items() for member in members.split()}
_HAN = {'Hans': ('gb2312', 'big5'), 'Hant': ('big5', 'gb2312')}  # encodings of the characters of one, and of the other
_SCRIPTS = {'Jpan': r'[\p{Hani}\p{Hira}\p{Kana}]', 'Kore': r'[\p{Hang}\p{Hani}]'} | dict.fromkeys(_HAN, r'\p{Hani}')


def is_installed() -> bool:
  return importlib.util.find_spec('py3langid') is not None


@functools.cache
def _identifier():
  from py3langid import langid

  return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


@functools.lru_cache(16)
def _identifier_of(names: frozenset[str]):
  """The identifier of some of its classes."""
  identifier = copy.copy(_identifier())
  identifier.set_languages(names)
  return identifier


@functools.cache
def base(code: str) -> str:
  """Code of a language without region or script, by ISO 639-1 where that has one: 'de' of 'deu_Latn'."""
  import babel.core

  code = re.split('[-_]', code)[0].lower()
  return babel.core.get_global('language_aliases').get(code, code).partition('_')[0]


def is_known(code: str) -> bool:
  """Whether a code is that of a language."""
  import babel

  return base(code) in babel.Locale('en').languages


@functools.cache
def script(code: str) -> str | None:
  """Script of a language's variant, as far as its code says it: 'Hant' of 'zh-TW'."""
  _, *more = re.split('[-_]', code)
  named = [part.title() for part in more if re.fullmatch('[A-Za-z]{4}', part)]
  return next(iter(named or _usual(code, *more)[1:2] * bool(more)), None)


def _usual(code: str, *more: str) -> list[str]:
  """Language, script and region where a code does not say them: ['zh', 'Hans', 'CN']; of a region, as far as known."""
  import babel.core

  likely = babel.core.get_global('likely_subtags')
  named = '_'.join([base(code), *(part.upper() for part in more)])
  return likely.get(named, likely.get(base(code), '') if not more or base(code) == 'zh' else '').split('_')


@functools.cache
def _script_or_usual(code: str) -> str:
  return script(code) or ''.join(_usual(code)[1:2])


def is_name(text: str, language: str, spoken: Iterable[str]) -> bool:
  """Whether a text is a code of a language, or its name in English or in one that is spoken."""
  import babel

  if re.fullmatch(r'[A-Za-z]{2,3}([-_]\w{2,8})*', text) and base(text) == base(language):
    return True
  with contextlib.suppress(babel.UnknownLocaleError, ValueError):
    return any(
      text.lower() == babel.Locale(base(code)).languages.get(base(language), '').lower() for code in ('en', *spoken)
    )
  return False


@functools.cache
def _letter(name: str) -> regex.Pattern | None:
  """Letter of a script; None of one that Unicode does not have."""
  with contextlib.suppress(regex.error):
    return regex.compile(_SCRIPTS.get(name, rf'\p{{Script={name}}}'))
  return None


@functools.cache
def _is_of_the_other(c: str, name: str) -> bool:
  """Whether a character is of the other way to write Chinese alone, by the standard encodings of both."""
  is_in = lambda encoding: bool(c.encode(encoding, errors='ignore'))
  own, other = _HAN[name]
  return is_in(other) and not is_in(own)


def _count(text: str, name: str) -> int:
  """Letters of a text that are of a script; of Chinese those that are not of the other way to write it alone."""
  letters = letter.findall(text) if (letter := _letter(name)) else ()
  return sum(name not in _HAN or not _is_of_the_other(c, name) for c in letters)


@functools.lru_cache(16)
def _classes(codes: tuple[str, ...]) -> dict[str, list[str]]:
  """By class of py3langid the languages it is: those of its code, or its macrolanguage, or members without a class."""
  names, found = sorted({*_identifier().nb_classes}), {}
  known = {*map(base, names)}
  for name in names:
    members = {*_MACROLANGUAGES.get(base(name), '').split()} - known
    for wanted in ({base(name)}, {_MACROLANGUAGE.get(base(name))}, members):
      if same := [code for code in codes if base(code) in wanted]:
        found.setdefault(name, same)
  return found


def rank(text: str, codes: Collection[str]) -> list[tuple[str, float]]:
  """Languages and their probabilities, likeliest first; without codes, of all that py3langid knows.

  The script decides between scripts. Variants that cannot be told apart each have that of all, the usual one first.
  """
  codes = tuple(sorted(codes if _classes(tuple(sorted(codes))) else {*_identifier().nb_classes}))
  of_script = {name: _count(text, name) for name in {*map(_script_or_usual, codes)}}
  counts = {code: of_script[_script_or_usual(code)] for code in codes}
  codes = tuple(code for code in codes if 2 * counts[code] >= max(counts.values()))
  classes = _classes(codes)
  found = dict.fromkeys(codes, 0.0 if classes else 1 / len(codes))
  for name, p in _identifier_of(frozenset(classes)).rank(text) if classes else ():
    same = [code for code in classes[name] if counts[code] == max(map(counts.get, classes[name]))]
    found |= {code: found[code] + p for code in same}
  is_usual = lambda code: {*re.split('[-_]', code)[1:]} <= {*_usual(code)}
  return sorted(found.items(), key=lambda item: (-item[1], not is_usual(item[0])))


class OtherLanguage:
  """Whether a text is almost certainly in another language than `code`; never of one that py3langid does not know.

  In another script than the usual one, it is told by that alone.
  """

  def __init__(self, code: str) -> None:
    self._script = script(code)
    is_usual = self._script in (None, *_usual(code), *_HAN)
    self._names = {*_classes((code,))} if is_usual else set()
    # What of the language is not told from others, in words; '' where all is.
    self.untold = ''
    if not self._names:
      self.untold = f'{code}: told by its script alone' if self._script else f'{code}: py3langid does not know it'
    elif {*re.split('[-_]', code)[1:]} - {self._script} and self._script not in _HAN:
      self.untold = f'{code}: told as {base(code)}'

  def __call__(self, text: str) -> bool:
    letters = len(_LETTERS.findall(text))
    if letters < _FEW_LETTERS:
      return False
    if self._script in _HAN:
      own, other = (_count(text, name) for name in sorted(_HAN, key=lambda name: name != self._script))
      if own < _OWN_HAN * other:
        return True
    elif self._script and _letter(self._script) and _count(text, self._script) < _OWN_SCRIPT * letters:
      return True
    ranked = _identifier().rank(text) if self._names else ()
    return bool(ranked) and sum(p for name, p in ranked if name in self._names) < _SURELY_OTHER
