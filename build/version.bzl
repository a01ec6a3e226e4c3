"""The version of all of Tessera's distributions: `./bazelw run //build:version -- X.Y.Z` changes it everywhere."""

VERSION = "0.1.0"
