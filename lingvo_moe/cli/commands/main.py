"""Entry point lingvo-moe: finds the module of a subcommand, and runs its main.

A new subcommand is a line of COMMANDS. Its main reads sys.argv, of which the first word is then 'lingvo-moe <name>'.
See lingvo_moe/cli/commands/lint.py for a short one.
"""

import importlib
import sys

import lingvo_moe
from lingvo_moe.cli import app
from lingvo_moe.core.errors import closest

# By name, in the order in which they are listed: the module, and what it does.
COMMANDS = {
  'models': ('cli.commands.models', 'list the models, or describe one'),
  'cldr': ('cli.commands.cldr', 'make the default corpus, 125 languages into English'),
  'prepare': ('cli.commands.prepare', 'make a corpus of your own text: train, dev and test'),
  'vocab': ('cli.commands.vocab', 'train a vocabulary to share between runs'),
  'tokenize': ('cli.commands.tokenize', 'tokenise a large corpus before training, in many processes'),
  'import': ('cli.commands.import_', 'import a public checkpoint: Marian, NLLB, T5, Switch, Mixtral'),
  'train': ('trainer', 'train a model, or resume a run'),
  'decode': ('decoder', 'evaluate checkpoints on held-out text: BLEU, perplexity, samples'),
  'translate': ('translate', 'translate standard input'),
  'serve': ('serve', 'translate over HTTP'),
  'distill': ('cli.commands.distill', 'translate training text, for a smaller model to learn from'),
  'export': ('cli.commands.export', 'export a run as a SavedModel, for CTranslate2 or LiteRT'),
  'report': ('cli.commands.report', 'write a report on one run or two, as one HTML file'),
  'average': ('cli.commands.average', 'average checkpoints of a run'),
  'compare': ('cli.commands.compare', 'compare two runs by their translations'),
  'checkpoint': ('cli.commands.checkpoint', 'list and verify the tensors of a checkpoint'),
  'launch': ('cli.commands.launch', 'start several processes of one run on this machine'),
  'cost': ('cli.commands.cost', 'predict memory and time on a TPU slice or GPUs, without any'),
  'parity': ('cli.commands.parity', 'compare a model on meshes with one device'),
  'lint': ('cli.commands.lint', 'find tensors that a mesh does not split'),
}


def main() -> None:
  arguments = sys.argv[1:]
  name = arguments[0] if arguments else '--help'
  if name in ('--help', '-h', 'help'):
    app.print_whole(usage())
    sys.exit(0 if arguments else 1)
  if name == '--version':
    print(f'lingvo-moe {lingvo_moe.__version__}')
    sys.exit(0)
  if name not in COMMANDS:
    sys.exit(f'error: there is no command {name!r}; {closest(name, COMMANDS)} (lingvo-moe --help lists all)')
  sys.argv = [f'lingvo-moe {name}', *arguments[1:]]
  module = importlib.import_module(f'lingvo_moe.{COMMANDS[name][0]}')
  module.main()


def usage() -> str:
  """The subcommands, a line each."""
  width = max(map(len, COMMANDS))
  lines = [f'  {name:{width}}  {about}' for name, (_, about) in COMMANDS.items()]
  return (
    'lingvo-moe COMMAND [--flag=value ...]\n\n'
    'Mixture-of-experts Transformers after GShard: to train, decode and translate with, and to measure.\n\n'
    + '\n'.join(lines)
    + '\n\nlingvo-moe COMMAND --help says what a command does, and has its flags; lingvo-moe --version has the version.'
  )


if __name__ == '__main__':
  main()
