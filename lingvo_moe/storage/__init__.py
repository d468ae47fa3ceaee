"""Files on disk and on remote file systems: atomic writes, JSON with checksums, new folders, locks, log directories."""
