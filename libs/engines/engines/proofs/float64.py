"""The earlier place of `engines.prove.float64`."""

from engines.prove.float64 import KeepFloat64 as KeepFloat64
