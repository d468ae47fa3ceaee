"""Table 4 of the paper (partitioned operators) and related cases, measured here, as blocks of Markdown."""

from collections.abc import Mapping, Sequence

from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime.chips import Topology
from lingvo_moe.text.markdown import table
from paper import partitioned
from paper.listing import LISTING
from paper.operators import COMMUNICATION, TABLE_4, UNEVEN, WINDOWS, Operator, large

_SHORT = {
  'all-reduce': 'AR',
  'all-gather': 'AG',
  'all-to-all': 'AA',
  'collective-permute': 'CP',
  'reduce-scatter': 'RS',
}
_DEVICES = (2, 4, 8)
_TPU = 'v3:2x2'
_CASES = {
  'The annotated MoE layer (section 3.2)': LISTING,
  'Communication and resharding (section 3.3)': COMMUNICATION,
  'Convolutions and other windows (appendix A.4)': WINDOWS,
  'Uneven sizes, and operators that move what they keep (section 3.3.3)': UNEVEN,
}


def blocks() -> list[str]:
  """Markdown blocks: every operator is run on devices of this CPU; with libtpu, those of Table 4 compile for a TPU."""
  unmatched = [operator for operator in TABLE_4 if 'AG' in operator.communication]
  looped = '; '.join(f'{operator.split} split: {_on_tpu(large(operator))}' for operator in unmatched)
  return [
    '## Table 4: operators, partitioned',
    f'Growth of what a device computes (operations as XLA counts them) and of the bytes it takes or gives, from '
    f'{_DEVICES[0]} to {_DEVICES[-1]} devices of a CPU, and the collectives that XLA puts in: AR all-reduce, AG '
    'all-gather, AA all-to-all, CP collective-permute. A difference is the largest from one device, relative to the '
    'largest entry.',
    table(
      ['operator', 'split', 'compute: paper', 'here', 'communication: paper', 'here', f'on TPU {_TPU}']
      + ['difference', 'note'],
      map(_scaling, TABLE_4),
    ),
    f'Where both operands are split and do not match, and are of 1 GiB, on TPU {_TPU} (Figure 4c: in a loop): '
    f'{looped}.',
    *(block for title, operators in _CASES.items() for block in _cases(title, operators)),
  ]


def _scaling(operator: Operator) -> tuple[str, ...]:
  measured = [partitioned.measure(operator, devices) for devices in _DEVICES]
  grows = lambda figure: partitioned.growth([getattr(m, figure) for m in measured], _DEVICES)
  return (
    operator.name,
    operator.split,
    operator.compute,
    grows('flops'),
    operator.communication,
    f'{grows("bytes")} {_short(measured[1].collectives)}'.strip(),
    _on_tpu(operator),
    f'{max(m.difference for m in measured):.0e}',
    operator.note,
  )


def _cases(title: str, operators: Sequence[Operator]) -> list[str]:
  rows = []
  for operator in operators:
    measured = partitioned.measure(operator, 4)
    collectives = _short(measured.collectives) or 'none'
    rows.append(
      (operator.name, operator.split, operator.where, collectives, f'{measured.difference:.0e}', operator.note)
    )
  columns = ['operator', 'split', 'in the paper', 'collectives on 4 devices', 'difference', 'note']
  return [f'### {title}', table(columns, rows)]


def _short(collectives: Mapping[str, int]) -> str:
  return ', '.join(f'{count} {_SHORT[kind]}' for kind, count in collectives.items())


def _on_tpu(operator: Operator) -> str:
  """Kinds of the collectives in the operator compiled for a TPU slice."""
  try:
    found = partitioned.compile_only(operator, Topology.parse(_TPU))
  except UserError:
    return 'unknown: no libtpu'
  return ', '.join(_SHORT[kind] for kind in found) or 'none'
