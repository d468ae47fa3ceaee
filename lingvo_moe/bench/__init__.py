"""What tools/bench.py times: one measurement a file, the clock they share, and how figures are compared."""
