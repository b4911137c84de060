"""The command line: parse, load the config, call one function, print. One file per verb."""
