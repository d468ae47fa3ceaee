"""Analysis of compiled programs and runs: parity on a mesh, sharding lint, memory, FLOPs, communication, time."""
