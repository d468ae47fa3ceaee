"""Command line: options, start-up and machine of a job; the commands are in commands/."""
