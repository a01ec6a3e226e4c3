"""The version of all of Tessera's distributions: `./bazelw run //build:version -- X.Y.Z` changes it everywhere."""

VERSION = "0.1.0"

# Where this tree can be read by others, without a slash at the end: `HOME/README.md` is this tree's README.md. Where it is
# set, every wheel and sdist names its homepage, documentation and changes; the tree has no such place yet.
HOME = ""
