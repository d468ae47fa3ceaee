"""Names of the arrays in a batch, int32 [B, T] each; input.py says what they hold."""

SOURCE_KEYS = ('src_ids', 'src_segments', 'src_positions')
TARGET_KEYS = ('tgt_inputs', 'tgt_labels', 'tgt_segments', 'tgt_positions')
BATCH_KEYS = SOURCE_KEYS + TARGET_KEYS
