"""Verdict on a run in words, from its own numbers: each rule is a function of numbers, and says what to try."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lingvo_moe.addons.report.series import text
from lingvo_moe.core.errors import listed, plural

Points = Sequence[tuple[float, float]]  # (step, value)

_LATEST = 0.2  # share of a run that counts as its end
_GAIN = 0.005  # relative gain over the end of a run below which it has levelled off
_RISE = 0.01  # relative change of a loss that is no chance
_SOME_DROPPED, _MANY_DROPPED = 0.05, 0.2  # shares of the choices of experts
_UNEVEN = 3.0  # load of the fullest expert in multiples of the mean
_WAITING = 0.1  # share of the time


class Judgement(NamedTuple):
  """Sentence of a verdict."""

  kind: Literal['good', 'open', 'bad']
  headline: str
  said: str
  advice: str = ''


def improving(measured: Points, metric: str = 'dev loss', larger: bool = False) -> Judgement:
  """Whether the dev loss, or a score that is better if it is larger, still improves."""
  if len(measured) < 2:
    known = f'is {text(measured[0][1])} at step {text(measured[0][0])}' if measured else 'is not known yet'
    return Judgement('open', 'Too early to say', f'The {metric} {known}; two evaluations show a change.')
  best_of = lambda points: min(points, key=lambda point: (-point[1] if larger else point[1], point[0]))
  step, best = best_of(measured)
  last_step, last = measured[-1]
  if step != last_step:
    later = plural(sum(s > step for s, _ in measured), 'evaluation')
    said = f'The best {metric} is {text(best)}, at step {text(step)}; after {later} more it is {text(last)}.'
    advice = 'the best checkpoint as it is, a lower learning_rate in a new run from it (--init_from), or more text'
    return Judgement('open', f'No better since step {text(step)}', said, advice)
  before = [point for point in measured[:-1] if point[0] <= (1 - _LATEST) * last_step] or measured[:1]
  since, reference = best_of(before)
  gain = abs(best - reference) / max(abs(reference), 1e-12)
  said = f'The {metric} went from {text(reference)} at step {text(since)} to {text(best)} at step {text(step)}.'
  if gain < _GAIN:
    return Judgement('open', 'Levelled off', said, 'a larger model or more text, rather than more steps')
  return Judgement('good', 'Still improving', said, 'more steps: a larger max_steps')


def over_fitting(dev: Points, train: Points) -> Judgement | None:
  """Whether the training loss goes on falling while the dev loss rises."""
  step, least = min(dev, key=lambda point: point[1], default=(0, 0.0))
  if sum(s > step for s, _ in dev) < 2 or dev[-1][1] < (1 + _RISE) * least:
    return None
  size = max(1, len(train) // 10)
  then, now = ([y for s, y in train if s <= step][-size:], [y for s, y in train if s > step][-size:])
  if not (then and now) or statistics.fmean(now) > (1 - _RISE) * statistics.fmean(then):
    return None
  said = (
    f'Since step {text(step)} the training loss fell from {text(statistics.fmean(then))} to '
    f'{text(statistics.fmean(now))}, and the dev loss rose from {text(least)} to {text(dev[-1][1])}.'
  )
  return Judgement('bad', 'Over-fitting', said, 'more text, a larger residual_dropout, or a smaller model')


def experts(choices: Mapping[str, Sequence[float]], steps: int) -> Judgement:
  """Whether experts are not used, or one far more than others, by the choices of every expert in the last steps."""
  unused = {layer: [str(e) for e, n in enumerate(loads) if not n > 0] for layer, loads in choices.items()}
  layers = [f'{len(es)} of {len(choices[layer])} in {layer} ({listed(es)})' for layer, es in unused.items() if es]
  shares = {layer: max(loads) / max(statistics.fmean(loads), 1e-9) for layer, loads in choices.items()}
  layer = max(shares, key=shares.__getitem__)
  fullest = f'the fullest expert has {text(shares[layer])} times the mean load, in {layer}.'
  last, advice = f'In the last {plural(steps, "step")} ', 'a larger aux_loss_weight'
  if layers:
    said = f'{last}these had no token: {listed(layers, between="; ")}; {fullest}'
    return Judgement('bad', 'Some experts are not used', said, f'{advice}, or fewer num_experts, in a new run')
  if shares[layer] >= _UNEVEN:
    return Judgement('open', 'Experts are used unevenly', last + fullest, f'{advice} in a new run')
  return Judgement('good', 'Every expert is used', last + fullest)


def dropped(shares: Mapping[str, float]) -> Judgement:
  """Share of the choices of experts that found no slot, by MoE layer."""
  layer = max(shares, key=shares.__getitem__)
  said = f'{statistics.fmean(shares.values()):.1%} of the choices of experts found no slot; most in {layer}, '
  said += f'{shares[layer]:.1%}.'
  if shares[layer] < _SOME_DROPPED:
    return Judgement('good', 'Few choices are dropped', said)
  kind, headline = ('bad', 'Many') if shares[layer] >= _MANY_DROPPED else ('open', 'Some')
  advice = 'a larger aux_loss_weight, or a larger capacity_factor (None drops none), in a new run'
  return Judgement(kind, f'{headline} choices are dropped', said, advice)


def waiting(share: float) -> Judgement | None:
  """Share of the time of training spent waiting for data."""
  if share < _WAITING:
    return None
  said = f'At the end of the run, {share:.0%} of the time went into waiting for batches.'
  return Judgement('open', 'Training waits for data', said, 'a cache_dir on a local disk, or more processor cores')


def diverged(finished: Mapping[str, Any], reason: str) -> Judgement | None:
  """Whether training ended since the loss was not finite, which is the `reason` of the end."""
  if finished.get('reason') != reason:
    return None
  advice = 'a lower learning_rate, more warmup_steps, or clip_norm, in a new run'
  return Judgement('bad', 'Diverged', f'At step {text(finished.get("step"))} {reason}.', advice)


def compared(best: Mapping[str, tuple[float, float]]) -> Judgement:
  """The order of runs by their best dev loss on the same text: (loss, step) by name."""
  order = sorted(best, key=best.__getitem__)
  losses = [f'{name} {text(best[name][0])} at step {text(best[name][1])}' for name in order]
  return Judgement('open', f'{order[0]} has the lowest dev loss', f'Best dev losses: {listed(losses, between="; ")}.')
