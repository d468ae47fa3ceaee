"""Axis letters: the names of tensors end in them (`x_GSM`), and einsums and sharding rules are written in them."""

AXES = {
  'G': 'groups of tokens that are routed together',
  'S': 'tokens of a group (the paper writes N = G * S for all tokens)',
  'E': 'experts',
  'C': 'slots an expert offers a group (capacity)',
  'X': 'slots of all experts: E * C of a group, or of all groups where they are flattened too',
  'R': "rank: of a token's choice of expert (first, second), or features between the two parts of an adapter",
  'M': 'model (embedding) features',
  'H': 'hidden features of a feed-forward layer',
  'B': 'rows of a batch',
  'T': 'positions of a row',
  'U': 'positions attended to',
  'W': 'hypotheses of a beam',
  'J': 'alternatives, never split: candidates, buckets, gates of an LSTM, features of a gate, states, shared heads',
  'N': 'attention heads',
  'K': 'features of a head',
  'Q': 'query heads that share a key/value head, where there are several (grouped-query attention)',
  'V': 'symbols of a vocabulary',
  'P': 'language pairs of an evaluation, or tasks of a gate',
  'L': 'layers of a scanned stack',
  'D': 'devices; of a pipeline, parts of a micro-batch along mesh axis data',
  'A': 'stages of a pipeline',
  'O': 'micro-batches of a pipeline, one after the other',
  'Z': 'stages of a pipeline, and in each the parts D of a micro-batch',
  'I': 'rows of a micro-batch, or of a part of it',
  'F': 'tokens or choices of a whole batch, in one row',
  'Y': 'terms that a translation must have',
  '1': 'an axis of length one',
}


def check(dims: str) -> str:
  """Returns `dims` if every letter is in the alphabet, else raises ValueError naming the letter."""
  for letter in dims:
    if letter not in AXES:
      raise ValueError(f'axis letter {letter!r} of {dims!r} is not in the alphabet {"".join(AXES)}')
  return dims
