"""Language of a text, among those of a model, by py3langid."""

import functools
from collections.abc import Collection

from py3langid import langid

from lingvo_moe.corpora import language_id

_MOST = 10_000  # characters that are read


class Detector:
  """Detector of languages.

  Args:
    codes: languages of a model, such as 'de' or 'deu_Latn'; those that py3langid does not know are never found. Without
      any, all that it knows are.
  """

  def __init__(self, codes: Collection[str]) -> None:
    self._codes = codes

  @functools.cached_property
  def _identifier(self) -> tuple[langid.LanguageIdentifier, dict[str, str]]:
    """The identifier, read at the first use, and the model's codes by its own."""
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    known = set(identifier.nb_classes)
    codes = {language_id.base(code): code for code in sorted(self._codes)}
    codes = {base: code for base, code in codes.items() if base in known} or {base: base for base in known}
    identifier.set_languages(codes)
    return identifier, codes

  def __call__(self, text: str) -> list[dict[str, float | str]]:
    """The languages of a text as LibreTranslate has them, likeliest first, with confidences in percent."""
    identifier, codes = self._identifier
    ranked = [(code, round(100 * p, 1)) for code, p in identifier.rank(text[:_MOST])]
    return [{'confidence': percent, 'language': codes[code]} for code, percent in ranked if percent]
