"""The verbs of the command line: plain functions that return an exit code, loaded when they are asked for."""
