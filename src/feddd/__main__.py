"""``python -m feddd``: the command line."""

from feddd.cli import main

main()
