"""Length normalisation of beam search: what a log-probability is divided by to rank hypotheses of different lengths."""

from typing import Any, NamedTuple


class LengthNorm(NamedTuple):
  """Length penalty ((k + |Y|) / (k + 1)) ** alpha; with alpha 0 hypotheses are ranked by log-probability.

  k = 5 is GNMT's (arXiv:1609.08144, eq. 14), k = 0 that of Hugging Face transformers.
  """

  alpha: float
  k: float = 5.0

  def penalty(self, length: Any) -> Any:
    """Penalty of lengths, an array or tensor of float32."""
    return ((self.k + length) / (self.k + 1.0)) ** self.alpha
