"""python tools/quickstart_time.py MODEL [--max_steps=N]: estimates how long tools/quickstart takes here.

Times a few training steps of the model on random ids. The other parts of the quickstart are in proportion to them, or
take some seconds.
"""

from absl import flags

from lingvo_moe.cli import app, machine
from lingvo_moe.config import configuration
from lingvo_moe.core import progress
from lingvo_moe.core.errors import UserError

_MAX_STEPS = flags.DEFINE_integer('max_steps', None, "Training steps; default: the model's.", lower_bound=0)
# Measured with 16 languages on two cores of an Intel Xeon (AMX): a step of the corpus over one of a full batch; seconds
# of evaluating and of translating the test set, in steps; seconds of imports, tracing, the corpus and the report.
_REAL, _OTHER_STEPS, _OTHER_SECONDS = 1.0, 150, 60


@app.command(arguments=True)
def main(argv: list[str]) -> None:
  if len(argv) != 2:
    raise UserError(f'the model of the quickstart is given; saw {" ".join(argv[1:]) or "none"!r}')
  from benchmarks import steps
  from benchmarks.clock import Clock

  config = configuration.resolve(argv[1], [], [], [])
  machine.set_threads(machine.LOCAL, decoding=False)
  each = steps.train(config, Clock(3, 5), machine.connect(machine.LOCAL).make_runtime)['median_s']
  made = config.max_steps if _MAX_STEPS.value is None else _MAX_STEPS.value
  seconds = each * (made * _REAL + _OTHER_STEPS) + _OTHER_SECONDS
  print(f'{progress.duration(seconds)} here, at {1 / each:.2g} steps a second')


if __name__ == '__main__':
  main()
