"""The earlier place of `load_object`."""

from seqpack.extensions.load_object import load_object as load_object
