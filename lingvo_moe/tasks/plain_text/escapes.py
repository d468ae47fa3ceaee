"""Line breaks in a text that stands on one line: each is a backslash and an n or r, and a backslash is two of them."""


def escaped(text: str) -> str:
  r"""A text on one line: 'a<line break>b' is a\nb."""
  return text.replace('\\', '\\\\').replace('\n', '\\n').replace('\r', '\\r')


def unescaped(line: str) -> str:
  """The text of a line that `escaped` made. A backslash before another character stands for itself."""
  return '\\'.join(part.replace('\\n', '\n').replace('\\r', '\r') for part in line.split('\\\\'))
