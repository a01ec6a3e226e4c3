"""Requirements of a run: features of the code, and the machine that it starts on."""
