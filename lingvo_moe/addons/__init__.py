"""What stands around the zoo; training and decoding do without it."""
