"""A Python with the packages of its target, for programs that start an interpreter by its path."""

import os
import sys

os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
