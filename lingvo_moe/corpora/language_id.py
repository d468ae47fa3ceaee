"""Identification of a line's language by py3langid (Lui and Baldwin 2012), as far as it is sure."""

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterable

_LETTERS = re.compile(r'[^\W\d_]')
_FEW_LETTERS = 20  # fewer tell too little
_SURELY_OTHER = 1e-3  # probability of its language below which a line is in another


def is_installed() -> bool:
  return importlib.util.find_spec('py3langid') is not None


@functools.cache
def _identifier():
  from py3langid import langid

  return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


@functools.cache
def base(code: str) -> str:
  """Code of a language without region or script, by ISO 639-1 where that has one: 'de' of 'deu_Latn'."""
  import babel.core

  code = re.split('[-_]', code)[0].lower()
  return babel.core.get_global('language_aliases').get(code, code)


def is_known(code: str) -> bool:
  """Whether a code is that of a language."""
  import babel

  return base(code) in babel.Locale('en').languages


@functools.cache
def script(code: str) -> str | None:
  """Script of a language's variant, as far as its code says it: 'Hant' of 'zh-TW'."""
  import babel

  with contextlib.suppress(babel.UnknownLocaleError, ValueError):
    return babel.Locale.parse(code.replace('_', '-'), sep='-').script
  return None


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


class OtherLanguage:
  """Whether a text is almost certainly in another language than `code`; never of one that py3langid does not know."""

  def __init__(self, code: str) -> None:
    self._language = base(code) if base(code) in set(_identifier().nb_classes) else None

  def __call__(self, text: str) -> bool:
    if self._language is None or len(_LETTERS.findall(text)) < _FEW_LETTERS:
      return False
    return dict(_identifier().rank(text))[self._language] < _SURELY_OTHER
