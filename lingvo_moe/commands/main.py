"""Entry point lingvo-moe: finds the module of a subcommand and runs its main by app.run, or another function.

A new subcommand is a line of COMMANDS: its name, 'module' or 'module:function', and what it does in a line. A function
takes no arguments; it reads sys.argv, of which the first word is then 'lingvo-moe <name>'. See
lingvo_moe/commands/lint.py for a short one.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import lingvo_moe
from lingvo_moe import app
from lingvo_moe.core.errors import closest


class Command(NamedTuple):
  """Where a subcommand is, and what it does."""

  function: str  # 'module:function', or 'module' for app.run(module.main)
  about: str


# In the order in which they are listed.
COMMANDS = {
  'models': Command('lingvo_moe.commands.models', 'list the models, or describe one'),
  'cldr': Command('lingvo_moe.commands.cldr:command', 'make the default corpus, 125 languages into English'),
  'prepare': Command('lingvo_moe.commands.prepare:command', 'make a corpus of own text: train, dev and test'),
  'vocab': Command('lingvo_moe.commands.vocab:command', 'train a vocabulary to share between runs'),
  'train': Command('lingvo_moe.trainer:command', 'train a model, or go on with a run'),
  'decode': Command('lingvo_moe.decoder:command', 'evaluate checkpoints on held-out text: BLEU, perplexity, samples'),
  'translate': Command('lingvo_moe.translate:command', 'translate standard input'),
  'serve': Command('lingvo_moe.serve:command', 'translate over HTTP'),
  'export': Command(
    'lingvo_moe.commands.export:command', 'export a run: a SavedModel from strings to strings, CTranslate2'
  ),
  'report': Command('lingvo_moe.commands.report:command', 'write a report on one run or two, as one HTML file'),
  'average': Command('lingvo_moe.commands.average:command', 'average checkpoints of a run'),
  'compare': Command('lingvo_moe.commands.compare:command', 'compare two runs by their translations'),
  'checkpoint': Command('lingvo_moe.commands.checkpoint:command', 'list and verify the tensors of a checkpoint'),
  'launch': Command('lingvo_moe.commands.launch:command', 'start several processes of one run on this machine'),
  'cost': Command('lingvo_moe.commands.cost', 'compile for a TPU slice without one, and say what it costs'),
  'parity': Command('lingvo_moe.commands.parity', 'compare a model on meshes with one device'),
  'lint': Command('lingvo_moe.commands.lint', 'find tensors that a mesh does not split'),
  'bench': Command('lingvo_moe.commands.bench:command', 'time models on random ids'),
}


def main() -> None:
  """Runs the subcommand that sys.argv names."""
  arguments = sys.argv[1:]
  name = arguments[0] if arguments else '--help'
  if name in ('--help', '-h', 'help'):
    app.print_whole(usage())
    sys.exit(0 if arguments else 1)
  if name == '--version':
    print(f'lingvo-moe {lingvo_moe.__version__}')
    sys.exit(0)
  if name not in COMMANDS:
    print(
      f'error: there is no command {name!r}; {closest(name, COMMANDS)} (lingvo-moe --help lists all)', file=sys.stderr
    )
    sys.exit(1)
  sys.argv = [f'lingvo-moe {name}', *arguments[1:]]
  module, _, function = COMMANDS[name].function.partition(':')
  module = importlib.import_module(module)
  getattr(module, function)() if function else app.run(module.main)


def usage() -> str:
  """The subcommands, a line each."""
  width = max(map(len, COMMANDS))
  lines = [f'  {name:{width}}  {command.about}' for name, command in COMMANDS.items()]
  return '\n'.join(
    [
      'lingvo-moe COMMAND [--flag=value ...]',
      '',
      'Mixture-of-experts Transformers after GShard: to train, decode and translate with, and to measure.',
      '',
      *lines,
      '',
      'lingvo-moe COMMAND --help says what a command does, and has its flags; lingvo-moe --version has the version.',
    ]
  )


if __name__ == '__main__':
  main()
