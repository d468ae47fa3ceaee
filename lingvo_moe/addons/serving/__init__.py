"""Translation over HTTP: lines of concurrent requests share batches of one run in memory."""
