"""The bodies of the commands; guard.cli only declares them."""
