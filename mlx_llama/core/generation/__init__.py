"""Options, random numbers, the decode loop, speculation, sessions."""
