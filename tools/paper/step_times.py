"""Time of a step by part of the model and by phase, next to Figure 8 and section 5.2 of the paper."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_moe.addons.analysis.parts import PHASES
from lingvo_moe.text.markdown import table
from paper import claims, plots
from paper.claims import Case
from paper.report_cache import configured

# Seconds, by phase of a report, of the parts into which the paper's section 5.2 and Figure 8 divide a MoE layer and the
# Transformer layer next to it, and of the rest of a step.
_seconds_of = lambda part, *kinds: lambda phase: sum(phase[part][f'{kind}_seconds'] for kind in kinds)
_both = lambda part: _seconds_of(part, 'compute', 'collective')
_EXCHANGE, _CUMSUM = 'MoE dispatch and combine (AllToAll)', 'gate cumsum'
LAYER_PARTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
  'Transformer attention': _both('attention'),
  'Transformer projections': _both('projections'),
  'Transformer feed-forward': _both('feed-forward'),
  'MoE feed-forward': _both('experts'),
  'gate einsums': lambda phase: _both('gating')(phase) + _seconds_of('dispatch/combine', 'compute')(phase),
  _CUMSUM: _both('cumsum'),
  _EXCHANGE: _seconds_of('dispatch/combine', 'collective'),
}
_OTHER_PARTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
  'output softmax': _both('softmax'),
  'optimiser and AllReduce': _both('optimiser'),
  'other': _both('other'),
}


def blocks(case: Case, compiled: Sequence[tuple[int, Mapping[str, Any]]], path: str, tiny: bool) -> list[str]:
  """Markdown blocks for the reports of models with a growing number of experts.

  Args:
    case: the first of them.
    compiled: (devices, report) of each.
    path: of the plot.
    tiny: whether they are tiny siblings, of which the paper says nothing.
  """
  if not compiled:
    return ['## Figure 8: the time of a step by part', 'None of the programs was compiled.']
  # {part: {phase: milliseconds for each number of devices}}, of the layers and of the rest of a step
  layers, rest = (
    {part: {p: [1e3 * of(report['phases'][p]) for _, report in compiled] for p in PHASES} for part, of in parts.items()}
    for parts in (LAYER_PARTS, _OTHER_PARTS)
  )
  of_phase = lambda parts, phase: {part: phases[phase] for part, phases in parts.items()}
  forward = of_phase(layers, 'forward')
  whole = sums(forward)
  shares = {part: [100 * ms / total for ms, total in zip(values, whole)] for part, values in forward.items()}
  with plots.page(path, columns=2, width=5.8, height=5.6) as (absolute, relative):
    names = [f'{d} experts\non {d} cores' for d, _ in compiled]
    of_step = {phase: sums(of_phase({**layers, **rest}, phase)) for phase in PHASES}
    plots.stacked(absolute, names, of_step, 'milliseconds a step, estimated')
    absolute.set_title('The whole train step, by phase')
    absolute.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.12), ncols=2)
    plots.stacked(relative, names, shares, 'per cent of the forward time of the layers')
    relative.set_title('Its layers forward, by part')
    relative.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.12), ncols=2)
    for x, (d, _) in enumerate(compiled):
      if d in claims.FIGURE_8['AllToAll'] and not tiny:
        at = 100 - 100 * claims.FIGURE_8['AllToAll'][d]
        relative.hlines(at, x - 0.42, x + 0.42, color='black', linestyle='--')
        relative.annotate(
          f'paper: {100 - at:.0f}%', (x + 0.3, at), xytext=(4, 3), textcoords='offset points', fontsize=8
        )
  line = lambda name, phases: (name, *(f'{phases[p][i]:.4g}' for i in range(len(compiled)) for p in PHASES))
  total = lambda parts: {phase: sums(of_phase(parts, phase)) for phase in PHASES}
  rows = [line(part, phases) for part, phases in layers.items()]
  rows.append(line('the layers', total(layers)))
  rows += [line(part, phases) for part, phases in rest.items()]
  rows.append(line('the step', total({**layers, **rest})))
  percent = [(part, *(f'{share:.1f}%' for share in values)) for part, values in shares.items()]
  blocks = [
    '## Figure 8: the time of a step by part',
    f'{layers_of(case)} layers, {tokens_a_core(case):,} source tokens a core, as many experts and groups as '
    'cores. A roofline: every operation at the peak of what bounds it, with no overlap. The parts are those of the '
    "paper's section 5.2: gate einsums are the first two einsums and the last of Algorithm 2, with the softmax and the "
    'argmax of the gate; cumsum is what finds the places in the queues of experts; dispatch and combine is the '
    'AllToAll. A norm, dropout and residual sum belong to the part they stand before or after.',
    '### Forward, of the time of the layers, as the paper draws it',
    table(['', *(f'{d} experts' for d, _ in compiled)], percent),
    '### Milliseconds a step by phase',
    table(['', *(f'{d} experts, {phase}' for d, _ in compiled for phase in PHASES)], rows),
  ]
  by_devices = {d: i for i, (d, _) in enumerate(compiled)}
  if {128, 2048} <= set(by_devices):
    few, many = by_devices[128], by_devices[2048]
    exchange, cumsum = forward[_EXCHANGE], shares[_CUMSUM]
    blocks += [
      '### Beside the statements of the paper, forward',
      table(
        ['', 'here', 'the paper'],
        [
          *(
            (
              f'share of AllToAll in the layers, {d} experts',
              f'{shares[_EXCHANGE][i]:.0f}%',
              f'{claims.FIGURE_8["AllToAll"][d]:.0%}',
            )
            for d, i in ((128, few), (2048, many))
          ),
          (
            'AllToAll, 2048 experts over 128',
            f'{exchange[many] / exchange[few]:.2f}',
            f'{claims.FIGURE_8["AllToAll grows"]:g}',
          ),
          ('the layers, 2048 experts over 128', f'{whole[many] / whole[few]:.2f}', f'{claims.FIGURE_8["step"]:g}'),
          (
            'share of the gate without einsums in the layers, 2048 experts',
            f'{cumsum[many]:.1f}%',
            f'below {claims.FIGURE_8["cumsum"]:.0%}',
          ),
        ],
      ),
    ]
  return [*blocks, plots.image('figure8')]


def sums(parts: Mapping[str, Sequence[float]]) -> list[float]:
  """Heights of stacked bars."""
  return [sum(values) for values in zip(*parts.values())]


def layers_of(case: Case) -> int:
  config = configured(case)
  return config.encoder_layers + config.decoder_layers


def tokens_a_core(case: Case) -> int:
  return configured(case).batch_tokens // case.devices
