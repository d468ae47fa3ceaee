"""Files of lines: text, and JSON."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any


def write(path: str | pathlib.Path, lines: Iterable[Any]) -> None:
  """Writes a file, and the folders in which it lies."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(f'{line}\n' for line in lines), encoding='utf-8')


def records(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """Values of a file of JSON lines."""
  return [json.loads(line) for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines()]
