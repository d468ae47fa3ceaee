"""Text of which nothing can be seen: characters without a mark on a page, and lines of them."""

import re

# Characters of the Unicode categories Cf (format) and Cc (control), but for white space: no part of a sentence.
FORMAT = (
  '\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f'
  '\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f'
  '\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f'
)
# Other characters that leave no mark on a page: joiners, fillers, variation selectors and the blank pattern of Braille.
_BLANK = (
  '\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff'
)
INVISIBLE = FORMAT + _BLANK  # as within the brackets of a regular expression
_VISIBLE = re.compile(rf'[^\s{INVISIBLE}]')


def is_empty(line: str) -> bool:
  """Whether nothing of a line can be seen; such a line is translated to '', and nothing is learnt from it."""
  return _VISIBLE.search(line) is None
