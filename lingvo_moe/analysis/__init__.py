"""What compiled programs and runs tell: numbers on a mesh, what is split, memory, FLOPs, communication, time."""
