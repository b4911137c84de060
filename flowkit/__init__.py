"""flowkit post-trains flow-matching generators: online RL with reward models, sampling and scoring."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("flowkit")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"
