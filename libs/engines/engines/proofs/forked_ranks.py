"""The earlier place of `engines.prove.forked_ranks`."""

from engines.prove.forked_ranks import launch_forked as launch_forked
