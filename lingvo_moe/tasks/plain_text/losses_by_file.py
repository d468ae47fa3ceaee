"""Cross-entropy of held-out text, summed by file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from lingvo_moe.core.progress import Progress


def sums(
  evaluate: Callable[[Any], Mapping[str, np.ndarray]], batches: Collection[Any], files: int, label: str, quiet: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Nats and target tokens of each file, over all batches, with a progress bar.

  Args:
    evaluate: metrics of a batch, 'xent_by_file' and 'target_tokens_by_file' among them.
    batches: the batches.
    files: number of files.
    label: heads the bar.
    quiet: no bar.
  """
  nats, tokens = np.zeros(files), np.zeros(files)
  with Progress(len(batches), 'batch', label=label, quiet=quiet) as progress:
    for batch in batches:
      found = evaluate(batch)
      nats += found['xent_by_file']
      tokens += found['target_tokens_by_file']
      progress.update()
  return nats, tokens
