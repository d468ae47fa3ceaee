"""lingvo-moe report RUN [OTHER_RUN ...] [--out=report.html] [--split=test] [--data_dir=CORPUS]

Writes a report on a run, or on up to 8 with their curves in one plot, as one HTML file that opens offline. It shows
  a verdict in words: whether the run still improves, unused experts, drops, and what to try
  sample translations, BLEU and chrF by language
  loss, dev loss, tokens per second, learning rate, gradient norm and objective
  every MoE layer over time: load of each expert, drops, entropy, dead experts, and which languages use which experts
  configuration, versions and machine
Curves show their values under the pointer; each plot has a table of its points. A sentence names what a run lacks.

RUN is a log directory; translations are those of its newest decoded step. TensorFlow is not needed. A decoder of an
earlier version wrote no sources and references; they are then read from --data_dir.
"""

from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core.errors import UserError

_RUNS = 8  # the colours that the style sheet has for curves


class Options(OptionGroup):
  """Options of the command."""

  out: str | None = flag(None, 'The file to write; default: report.html in the first log directory.')
  split: str = flag('test', 'The held-out set of scores and samples: test, dev or any file prefix.')
  data_dir: str | None = flag(
    None, 'The corpus that was decoded, for sources and references; default: beside the translations.'
  )


@app.command(Options, tensorflow=False, arguments=True)
def main(argv: Sequence[str], options: Options) -> None:
  if not 2 <= len(argv) <= 1 + _RUNS:
    raise UserError(
      f'a report is of 1 to {_RUNS} runs: lingvo-moe report RUN [OTHER_RUN ...]; saw {" ".join(argv[1:]) or "none"!r}'
    )
  from lingvo_moe.addons.report import page

  out, size = page.write(argv[1:], options.split, options.data_dir, options.out)
  print(f'{out}: {size / 1000:.0f} kB; open it in a browser')


if __name__ == '__main__':
  main()
