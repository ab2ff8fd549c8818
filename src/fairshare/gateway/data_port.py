"""The port that clients talk to."""
