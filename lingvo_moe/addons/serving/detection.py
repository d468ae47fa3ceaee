"""Language of a text, among those of a model."""

from collections.abc import Collection

from lingvo_moe.corpora import language_id

_MOST = 10_000  # characters that are read


class Detector:
  """Detector of languages.

  Args:
    codes: languages of a model, such as 'de' or 'deu_Latn'. Where py3langid knows none of them, or there are none, all
      that it knows are found.
  """

  def __init__(self, codes: Collection[str]) -> None:
    self._codes = codes

  def __call__(self, text: str) -> list[dict[str, float | str]]:
    """The languages of a text as LibreTranslate has them, likeliest first, with confidences in percent."""
    ranked = [(code, round(100 * p, 1)) for code, p in language_id.rank(text[:_MOST], self._codes)]
    return [{'confidence': percent, 'language': code} for code, percent in ranked if percent]
