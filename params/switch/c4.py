"""Switch Transformers (Fedus, Zoph and Shazeer, arXiv 2101.03961): T5 with one expert a token, up to 1571B weights.

Its table 9, pre-trained by span corruption on C4. Layers are those of the encoder and as many of the decoder; heads are
of 64; 'Expert Freq.' 1/2 is experts in every other layer; section 5.6: batches of 2^20 tokens, 550k steps.

| model | M | H | GEGLU | heads | layers | experts | weights there | here |
|---|---|---|---|---|---|---|---|---|
| Base | 768 | 2048 | yes | 12 | 12 | 128 | 7B (table 8: 7410M) | 7.42B |
| Large | 1024 | 2816 | yes | 16 | 24 | 128 | 26B | 26.3B with H=4096 and ReLU; 27.1B as printed |
| XXL | 4096 | 10240 | yes | 64 | 24 | 64 | 395B | 395B with 128 experts; 201B as printed |
| C | 2080 | 6144 | no | 32 | 15 | 2048 | 1571B | 1571B |

Two rows do not count to what they print. The sizes here are those of the released configurations (google/flaxformer,
t5x/configs/moe/models), which do: switch_classic_large.gin has H=4096 and ReLU, switch_xxl.gin 128 experts.

Training is as there: float32 router, truncated normal initial values with s = 0.1 (section 2.4), jitter of 1% of the
router's inputs, capacity factor 1.25, and 1.0 for C, balance loss 0.01, z-loss 1e-4 and no dropout in pre-training; the
paper fine-tunes with dropout 0.1 and expert_dropout 0.4. Departures: embeddings and position biases, which are looked
up, keep their own initial values; the output softmax of XXL and C shares the embedding; 32,000 pieces and 100 sentinels
are not padded to 32,128; see DenoisingConfig for T5's layers.
"""

from lingvo_moe.config import registry
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig


@registry.register
class Base(DenoisingConfig):
  """Switch-Base, 128 experts in every other layer: 7.42B weights, 224M used by a token. Published: 7B, and 7.41B.

  Result:  not yet run
  """

  vocab: str = 'pieces'
  vocab_size: int = 32_000
  batch_tokens: int = 2**20
  num_groups: int = 128
  encoder_layers: int = 12
  decoder_layers: int = 12
  model_dim: int = 768
  ff_dim: int = 2048
  num_heads: int = 12
  head_dim: int = 64
  activation: str = 'geglu'
  num_experts: int = 128
  gate: str = 'switch'
  init_scale: float = 0.1
  router_jitter: float = 0.01
  expert: str = 'geglu'
  capacity_factor: float | None = 1.25
  input_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  label_smoothing: float = 0.0
  z_loss_weight: float = 1e-4
  beta2_cap: float = 1.0
  max_steps: int = 550_000
  activation_dtype: str = 'bfloat16'
  dispatch: str = 'einsum'
  scan_layers: bool = True
  remat: str = 'block'


@registry.register
class Large(Base):
  """Switch-Large, 128 experts in every other layer: 26.3B weights, 741M used by a token. Published: 26B.

  Result:  not yet run
  """

  num_groups: int = 256
  encoder_layers: int = 24
  decoder_layers: int = 24
  model_dim: int = 1024
  ff_dim: int = 4096
  num_heads: int = 16
  activation: str = 'relu'
  expert: str = 'relu'


@registry.register
class XXL(Base):
  """Switch-XXL, 128 experts in every other layer: 395B weights, 11B used by a token. Published: 395B.

  Result:  not yet run
  """

  num_groups: int = 256
  encoder_layers: int = 24
  decoder_layers: int = 24
  model_dim: int = 4096
  ff_dim: int = 10_240
  num_heads: int = 64


@registry.register
class C(Base):
  """Switch-C, 2048 experts in every layer: 1.57T weights, 1.73B used by a token. Published: 1571B.

  Result:  not yet run
  """

  num_groups: int = 2048
  encoder_layers: int = 15
  decoder_layers: int = 15
  model_dim: int = 2080
  ff_dim: int = 6144
  num_heads: int = 32
  moe_every: int = 1
  num_experts: int = 2048
  capacity_factor: float | None = 1.0
  expert: str = 'relu'


_SIZES = dict(
  vocab_size=300,
  sentinels=10,
  inputs_length=32,
  batch_tokens=256,
  num_groups=4,
  encoder_layers=2,
  decoder_layers=2,
  model_dim=32,
  ff_dim=64,
  num_heads=4,
  head_dim=8,
  num_experts=8,
  max_steps=20,
)
registry.tiny(Base, '146k weights, 60.5k used by a token', **_SIZES)
registry.tiny(Large, '110k weights, 52.3k used by a token', **_SIZES)
registry.tiny(XXL, '146k weights, 60.5k used by a token', **_SIZES)
registry.tiny(C, '167k weights, 52.8k used by a token', **_SIZES)
