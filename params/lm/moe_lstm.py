"""Recurrent language models with up to 131,072 experts between two LSTMs (Shazeer et al., 2017, arXiv 1701.06538).

Appendix C: embedding, LSTM, experts, LSTM, softmax, all 512 features wide; the output of each layer gets dropout and is
added to its input, that of the experts after a sigmoid. An expert is relu(x wi) wo with 1024 hidden units. Noisy top-k
gates: k = 4 over all experts, or k = 2 over 16 groups and k = 2 in each (names that end in H), so a token visits four
experts in any model. One-billion-word benchmark: 793,471 words, batches of about 300,000, Adam with 1000 steps of
warmup and then 1 / sqrt(t), importance and load losses of weight 0.1. Appendix D (`News...`): 32 to 256 groups, batches
of 2.5M words of a private corpus of 100 billion, beta1 0 and a factored second moment, which is Adafactor.

All weights of tables 7 and 8, embedding and softmax excluded, are counted by a test.

Departures: symbols are SentencePiece's, as many as the paper's words; the softmax is a full one, where the paper trains
it by importance sampling; a window of 64 tokens holds whole lines one after the other, each with a state of its own
that begins at zero; hidden layers of experts are kept for the gradient, where the larger models recompute them;
embeddings are scaled by sqrt(M). MoE4 uses all four experts, as a soft mixture, without noise. Not given by the paper:
the base learning rate; the vocabulary of appendix D, where 100,000 words make up its totals, and its dropout.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.lm.lm_config import RecurrentConfig


@registry.register
class MoE32(RecurrentConfig):
  """MoE-32 of table 7 (37.8M without embedding and softmax): 850M weights, 415M used by a token.

  Result:  not yet run
  """

  vocab: str = 'pieces'
  vocab_size: int = 793_471
  documents: str = 'line'
  packing: bool = True
  window: int = 64
  batch_tokens: int = 64 * 4688
  num_groups: int = 16
  model_dim: int = 512
  ff_dim: int = 1024
  num_experts: int = 32
  gate: str = 'noisy_top_k'
  choices: int = 4
  capacity_factor: float | None = None
  round_capacity_factor: float = 8.0
  input_dropout: float = 0.1
  residual_dropout: float = 0.1
  label_smoothing: float = 0.0
  aux_loss_weight: float = 0.1
  optimizer: str = 'adam'
  schedule: str = 'warmup_inverse_sqrt'
  learning_rate: float = 1e-3
  warmup_steps: int = 1000
  max_steps: int = 27_000


@registry.register
class MoE4(MoE32):
  """MoE-4 of table 7 (8.4M without embedding and softmax), all experts used: 821M weights, 415M used by a token.

  Result:  not yet run
  """

  num_experts: int = 4
  gate: str = 'soft'


@registry.register
class MoE256(MoE32):
  """MoE-256 of table 7 (272.9M without embedding and softmax): 1.09B weights, 415M used by a token.

  Result:  not yet run
  """

  num_experts: int = 256


@registry.register
class MoE256H(MoE256):
  """MoE-256-h of table 7 (272.9M without embedding and softmax): 1.09B weights, 415M used by a token.

  Result:  not yet run
  """

  gate: str = 'hierarchical'
  choices: int = 2
  groups_of_experts: int = 16


@registry.register
class MoE1024H(MoE256H):
  """MoE-1024-h of table 7 (1079.0M without embedding and softmax): 1.89B weights, 416M used by a token.

  Result:  not yet run
  """

  num_experts: int = 1024
  input_dropout: float = 0.2
  residual_dropout: float = 0.2


@registry.register
class MoE4096H(MoE1024H):
  """MoE-4096-h of table 7 (4303.4M without embedding and softmax): 5.12B weights, 419M used by a token.

  Result:  not yet run
  """

  num_experts: int = 4096


@registry.register
class MoE34M(MoE1024H):
  """MoE-34M of table 7 (4313.9M without embedding and softmax), twice as wide: 5.94B weights, 848M used by a token.

  Result:  not yet run
  """

  model_dim: int = 1024
  ff_dim: int = 2048
  input_dropout: float = 0.3
  residual_dropout: float = 0.3


@registry.register
class MoE143M(MoE34M):
  """MoE-143M of table 7 (4371.1M without embedding and softmax), 4096 units: 6B weights, 956M used by a token.

  Result:  not yet run
  """

  num_experts: int = 256
  ff_dim: int = 8192
  lstm_dim: int = 4096
  input_dropout: float = 0.4
  residual_dropout: float = 0.4


@registry.register
class NewsMoE32(MoE32):
  """MoE-32 of table 8 (37.8M without embedding and softmax): 140M weights, 59.6M used by a token.

  Result:  not yet run
  """

  vocab_size: int = 100_000
  batch_tokens: int = 64 * 39_040
  num_groups: int = 128
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  optimizer: str = 'adafactor'
  learning_rate: float = 1e-2
  max_steps: int = 40_000


@registry.register
class NewsMoE256H(NewsMoE32):
  """MoE-256-h of table 8 (272.9M without embedding and softmax): 375M weights, 59.9M used by a token.

  Result:  not yet run
  """

  num_experts: int = 256
  gate: str = 'hierarchical'
  choices: int = 2
  groups_of_experts: int = 32


@registry.register
class NewsMoE1024H(NewsMoE256H):
  """MoE-1024-h of table 8 (1079.0M without embedding and softmax): 1.18B weights, 60.7M used by a token.

  Result:  not yet run
  """

  num_experts: int = 1024


@registry.register
class NewsMoE4096H(NewsMoE256H):
  """MoE-4096-h of table 8 (4303.4M without embedding and softmax): 4.41B weights, 63.9M used by a token.

  Result:  not yet run
  """

  num_experts: int = 4096
  groups_of_experts: int = 64


@registry.register
class NewsMoE16384H(NewsMoE256H):
  """MoE-16384-h of table 8 (17201.0M without embedding and softmax): 17.3B weights, 76.5M used by a token.

  Result:  not yet run
  """

  num_experts: int = 16_384
  groups_of_experts: int = 128


@registry.register
class NewsMoE65536H(NewsMoE256H):
  """MoE-65536-h of table 8 (68791.0M without embedding and softmax): 68.9B weights, 127M used by a token.

  Result:  not yet run
  """

  num_experts: int = 65_536
  groups_of_experts: int = 256


@registry.register
class NewsMoE131072H(NewsMoE65536H):
  """MoE-131072-h of table 8 (137577.6M without embedding and softmax): 138B weights, 194M used by a token.

  Result:  not yet run
  """

  num_experts: int = 131_072


@registry.register
class Shakespeare32(MoE32):
  """MoE-32 at the setting of lm.shakespeare.Dense, 128 wide, by character: 2.39M weights, 542k used by a token.

  Result:  dev loss 1.69 nats a character after 2000 steps (lm.shakespeare.Dense, a Transformer: 1.70)
  """

  vocab: str = 'char'
  vocab_size: int = 69
  documents: str = 'file'
  packing: bool = False
  batch_tokens: int = 768
  eval_batch_tokens: int = 8192
  num_groups: int = 4
  model_dim: int = 128
  ff_dim: int = 256
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  learning_rate: float = 3e-3
  warmup_steps: int = 100
  clip_norm: float = 1.0
  max_steps: int = 2000
  log_every: int = 50
  eval_every: int = 500


@registry.register
class ShakespeareDense(Shakespeare32):
  """Shakespeare32 with one expert 4 times as wide (MoE-1-Wide of appendix C.1): 543k weights, 534k used by a token.

  Result:  dev loss 1.70 nats a character after 2000 steps
  """

  num_experts: int = 0
  ff_dim: int = 1024


@registry.register
class Tiny(MoE256H):
  """MoE256H at the size of a test, of bytes, 4 groups of 4 experts: 100k weights, 42.7k used by a token."""

  vocab: str = 'byte'
  vocab_size: int = 260
  window: int = 16
  batch_tokens: int = 128
  num_groups: int = 4
  model_dim: int = 32
  ff_dim: int = 64
  num_experts: int = 16
  groups_of_experts: int = 4
  warmup_steps: int = 10
  max_new_tokens: int = 16
  max_steps: int = 20
  eval_every: int = 10
