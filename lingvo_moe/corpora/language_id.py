"""Identification of a line's language by py3langid (Lui and Baldwin 2012), as far as it is sure."""

import functools
import importlib.util
import re

_LETTERS = re.compile(r'[^\W\d_]')
_FEW_LETTERS = 20  # fewer tell too little
_SURELY_OTHER = 1e-3  # probability of its language below which a line is in another


def is_installed() -> bool:
  return importlib.util.find_spec('py3langid') is not None


@functools.cache
def _identifier():
  from py3langid import langid

  return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def base(code: str) -> str:
  """Code of a language without region or script, by ISO 639-1 where that has one: 'de' of 'deu_Latn'."""
  import babel.core

  code = re.split('[-_]', code)[0].lower()
  return babel.core.get_global('language_aliases').get(code, code)


class OtherLanguage:
  """Whether a text is almost certainly in another language than `code`; never of one that py3langid does not know."""

  def __init__(self, code: str) -> None:
    self._language = base(code) if base(code) in set(_identifier().nb_classes) else None

  def __call__(self, text: str) -> bool:
    if self._language is None or len(_LETTERS.findall(text)) < _FEW_LETTERS:
      return False
    return dict(_identifier().rank(text))[self._language] < _SURELY_OTHER
