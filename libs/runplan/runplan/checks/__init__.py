"""What a run requires: of the code, and of the machine that it starts on."""
