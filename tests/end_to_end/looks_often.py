"""`fairshare`, but it looks at its engines eight times as often: for tests of what it sees there."""

from fairshare.cli import main
from fairshare.gateway import instances

instances.CHECK_SECONDS = 0.125

if __name__ == "__main__":
    main()
