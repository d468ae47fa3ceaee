"""Configuration of the batches of any model: its corpus, their size, and the seed."""

import dataclasses

from lingvo_moe.config import fields
from lingvo_moe.config.fields import changeable, field
from lingvo_moe.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """Any model: corpus folder, batches and seed."""

  data_dir: str = changeable(
    '', 'Folder of the corpus; docs/corpora.md and docs/language_models.md describe its layout.'
  )
  batch_tokens: int = field(
    4096,
    'Positions of a batch, padding included; with an encoder, on the target and on the source side.',
    at_least=1,
    at_most=2**24,
  )
  eval_batch_tokens: int = changeable(
    0, 'batch_tokens of evaluation and decoding; 0: as in training.', at_least=0, at_most=2**24
  )
  num_groups: int = field(
    1, "G, groups whose tokens are routed together; each is whole rows, so G divides a batch's rows.", at_least=1
  )
  seed: int = field(
    1, 'Seed of initial weights, dropout, routing and the order of the examples.', at_least=0, at_most=2**63 - 1
  )

  def __post_init__(self):
    fields.check(self)
    self._check_combinations()

  def _check_combinations(self) -> None:
    """Rules between fields; a subclass calls its parent's first."""

  def _check_rows_fit(self, length: int, what: str) -> None:
    """Refuses batches that hold fewer rows of this length than there are groups; `what` names the length."""
    needed = length * self.num_groups
    for name in ('batch_tokens', 'eval_batch_tokens'):
      tokens = getattr(self, name)
      if tokens and tokens < needed:
        raise UserError(
          f'{name} must hold num_groups rows of {what}; saw {name}={tokens} with {self.num_groups} rows of {length}: '
          f'use at least {needed}, or shorter or fewer rows'
        )
